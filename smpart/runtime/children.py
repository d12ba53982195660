"""Worker processes: asked for from the zygote, watched, and ended.

One zygote serves all engines of a process. It ends when that process does, and its children end with it. A user's
script needs no ``if __name__ == "__main__"`` guard for it.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from smpart.errors import SmpartError

MESSAGE_BYTES = 1 << 17
"""Longest message to or from a zygote."""


@dataclass(frozen=True, slots=True)
class ForkRequest:
    """What a zygote is asked for: a child that calls ``target(fds)``.

    Attributes:
        target: ``module:function``.
        preload: modules of torch or transformers to import first, so that all children share them.
        path: ``sys.path`` of the asking process.
    """

    target: str
    preload: tuple[str, ...]
    path: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class KillRequest:
    """End a child, if it still lives, with SIGKILL."""

    pid: int


class Child:
    """A process forked by the zygote.

    Attributes:
        pid: its process id; may be reused by the system once `exit_code` is not None.
        fd: descriptor that turns readable when the process ended.
    """

    def __init__(self, zygote: Zygote, pid: int, status: socket.socket) -> None:
        self.pid = pid
        self._zygote = zygote
        self._status = status
        self.exit_code: int | None = None

    @property
    def fd(self) -> int:
        """Descriptor that turns readable when the process ended."""
        return self._status.fileno()

    def join(self, timeout: float | None) -> int | None:
        """Wait for the end; the exit code (negative: the signal), or None if it still runs after `timeout` seconds."""
        if self.exit_code is None:
            poller = select.poll()
            poller.register(self._status, select.POLLIN)
            if poller.poll(None if timeout is None else timeout * 1e3):
                data = self._status.recv(16)
                self.exit_code = (
                    int(data) if data else -signal.SIGKILL
                )  # silence: the zygote died, and its children too
        return self.exit_code

    def kill(self) -> None:
        """End it now."""
        if self.exit_code is None:
            self._zygote.kill(self.pid)

    def close(self) -> None:
        """Forget it (it goes on if it runs)."""
        self._status.close()


class Zygote:
    """This process's end of a zygote. Use `shared`. Methods may be called from any thread."""

    _shared: Zygote | None = None
    _lock = threading.Lock()

    def __init__(self) -> None:
        if not sys.executable:
            raise SmpartError("worker processes need a Python interpreter, and sys.executable is empty")
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-P", "-m", "smpart.runtime.zygote", str(theirs.fileno()), str(os.getpid())]
        with theirs:
            self._process = subprocess.Popen(
                command,
                env=_environment(),
                stdin=subprocess.DEVNULL,
                stdout=2,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self._control = ours

    @classmethod
    def shared(cls) -> Zygote:
        """The zygote of this process, started if there is none. Returns before it is ready."""
        with cls._lock:
            if cls._shared is None or not cls._shared.alive:
                if cls._shared is not None:
                    cls._shared.close()
                cls._shared = cls()
            return cls._shared

    @property
    def alive(self) -> bool:
        """Whether its process runs."""
        return self._process.poll() is None

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def fork(self, target: str, fds: Sequence[int], preload: Sequence[str] = ()) -> Child:
        """Fork a child that calls ``target(fds)`` (``module:function``) with its own copies of `fds`, and exits.

        Raises:
            SmpartError: the zygote cannot start or died.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            request = ForkRequest(target, tuple(preload), _module_path())
            try:
                answer = self._ask(request, [theirs.fileno(), *fds])
            except BaseException:
                ours.close()
                raise
        if isinstance(answer, str):
            ours.close()
            raise SmpartError(answer)
        return Child(self, int(answer), ours)

    def kill(self, pid: int) -> None:
        """Send SIGKILL to a child of the zygote; nothing happens if it ended."""
        with contextlib.suppress(SmpartError):  # a dead zygote has no children
            self._ask(KillRequest(pid), [])

    def close(self) -> None:
        """End the zygote and every child that still runs."""
        self._control.close()
        self._process.kill()
        self._process.wait()

    def _ask(self, request: ForkRequest | KillRequest, fds: Sequence[int]) -> Any:
        with self._lock:
            try:
                _send(self._control, request, fds)
                answer = self._control.recv(MESSAGE_BYTES)
            except OSError:
                answer = b""
        if answer:
            return pickle.loads(answer)
        code = self._process.wait()
        raise SmpartError(
            f"the process that forks workers ended with exit code {code}; what it wrote to stderr says why. "
            f"Does `{sys.executable} -c 'import torch, transformers, smpart'` work?"
        )


def _send(sock: socket.socket, message: object, fds: Sequence[int]) -> None:
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    sock.sendmsg([pickle.dumps(message)], rights, socket.MSG_NOSIGNAL)


def _environment() -> dict[str, str]:
    """The zygote's environment, and so its workers'. What the user set in it counts, but for the two that must be."""
    defaults = {
        # Compute threads sleep at barriers. A spinning one would hold its core for 10 ms after each work, and stall
        # the other lane or the engine whenever these share it.
        "OMP_WAIT_POLICY": "passive",
        "GOMP_SPINCOUNT": "30000",
        "TOKENIZERS_PARALLELISM": "false",
    }
    path = os.pathsep.join(dict.fromkeys(_module_path()))
    needed = {"PYTHONPATH": path, "OPENBLAS_NUM_THREADS": "1"}  # numpy's OpenBLAS would start threads when imported
    return {**defaults, **os.environ, **needed}


def _module_path() -> tuple[str, ...]:
    """``sys.path``, readable from any working directory."""
    return tuple(os.path.abspath(entry) for entry in sys.path)  # noqa: PTH100  (an empty entry is the current directory)


def _forget() -> None:
    """In a process forked from this one: the zygote is not ours, and must not outlive its owner because of us."""
    Zygote._lock = threading.Lock()
    if Zygote._shared is not None:
        Zygote._shared._control.close()
        Zygote._shared._process.returncode = 0  # not our child: nothing to wait for, nothing to warn about
        Zygote._shared = None


@atexit.register
def _close_shared() -> None:
    if Zygote._shared is not None:
        Zygote._shared.close()


os.register_at_fork(after_in_child=_forget)
