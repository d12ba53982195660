"""The process that workers are forked from: it has imported torch and transformers, and has done nothing else.

A worker forked from it starts in milliseconds and shares the imported code's memory (about 20 MB of its own, against
280 MB for a fresh process). It must fork before any OpenMP region ever ran in it, since a team does not survive a
fork, and while it has one thread only. So it is a program of its own, not a fork of the user's process.

The asking side is `smpart.runtime.children.Zygote`.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import pickle
import pkgutil
import select
import signal
import socket
import sys
import traceback
from typing import Any

from smpart.runtime.children import MESSAGE_BYTES, ForkRequest, KillRequest

_PRELOAD = ("torch", "transformers", "transformers.modeling_utils", "smpart.runtime.worker")
_MAX_FDS = 64
_PR_SET_PDEATHSIG = 1


def serve(control: socket.socket, parent: int) -> None:
    """Serve fork requests until the other end is closed or the process `parent` ended.

    Runs in the zygote. A child of it leaves through `os._exit` and never returns here.
    """
    children: dict[int, socket.socket] = {}
    ended, ended_writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(ended_writer, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    poller = select.poll()
    poller.register(control, select.POLLIN)
    poller.register(ended, select.POLLIN)
    own = [control.fileno(), ended, ended_writer]
    if (alive := _pidfd(parent)) is not None:
        poller.register(alive, select.POLLIN)
        own.append(alive)
    while True:
        ready = {fd for fd, _ in poller.poll()}
        if ended in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(ended, 4096)
            _reap(children)
        if alive in ready or os.getppid() != parent:
            return
        if control.fileno() in ready:
            request, fds = _receive(control)
            if request is None:
                return
            if isinstance(request, KillRequest):
                if request.pid in children:
                    os.kill(request.pid, signal.SIGKILL)
                answer: object = None
            else:
                answer = _fork(request, fds, children, own)
            control.send(pickle.dumps(answer))


def _fork(request: ForkRequest, fds: list[int], children: dict[int, socket.socket], own: list[int]) -> int | str:
    """Fork one child; its pid, or why there is none. `fds` starts with the status socket."""
    for name in request.preload:
        if name.partition(".")[0] in ("torch", "transformers"):  # the user's own modules are imported by workers only
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
    gc.collect()
    gc.freeze()  # a collection in a child would touch, and so copy, every page
    zygote = os.getpid()
    try:
        pid = os.fork()
    except OSError as error:
        for fd in fds:
            os.close(fd)
        return f"cannot start a worker process: {error}"
    if pid == 0:
        for fd in [fds[0], *own, *(status.fileno() for status in children.values())]:
            os.close(fd)
        _run_child(request, fds[1:], zygote)
    children[pid] = socket.socket(fileno=fds[0])
    for fd in fds[1:]:
        os.close(fd)
    return pid


def _run_child(request: ForkRequest, fds: list[int], zygote: int) -> None:
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        _die_with_parent(zygote)
        sys.path[:] = request.path
        pkgutil.resolve_name(request.target)(fds)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _reap(children: dict[int, socket.socket]) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        if pid in children:
            with children.pop(pid) as told, contextlib.suppress(OSError):
                told.send(str(os.waitstatus_to_exitcode(status)).encode())


def _receive(sock: socket.socket) -> tuple[Any, list[int]]:
    """The next message and its descriptors; None at the end of the stream."""
    data, fds, _, _ = socket.recv_fds(sock, MESSAGE_BYTES, _MAX_FDS)
    return (pickle.loads(data) if data else None), list(fds)


def _pidfd(pid: int) -> int | None:
    """A descriptor that turns readable when a process ends; None where the kernel has none or the process is gone."""
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None


def _die_with_parent(parent: int) -> None:
    """Have the kernel end this process with the one that forked it."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def main() -> None:
    """Run as ``python -m smpart.runtime.zygote CONTROL_FD PARENT_PID``."""
    control = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the engine, which then closes us
    for name in _PRELOAD:
        importlib.import_module(name)
    serve(control, int(sys.argv[2]))


if __name__ == "__main__":
    main()
