"""Life cycles of MPS daemons: one of our own, which we start and end, and one of somebody else's, which we only use.

Our own daemon lives in a directory of its own, so that it never meets another one. The directory's name says who made
it; whoever starts the next daemon ends and removes those whose maker died.
"""

from __future__ import annotations

import atexit
import logging
import os
import re
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from smpart.errors import BackendUnavailable, SmpartError
from smpart.partition.cuda.mps_control import PID_FILE, PIPE_VARIABLE, PROGRAM, Control, NoDaemon

logger = logging.getLogger(__name__)

DEFAULT_PIPE = Path("/tmp/nvidia-mps")
"""Where daemons and clients meet that were told nothing else."""

_LONGEST_SOCKET = 107
"""Bytes of a Unix socket's path (``sun_path`` without its terminator). A daemon over it starts, and never answers."""

_LONGEST_NAME = "control_privileged"
"""The longest name of a socket in a pipe directory."""

_POLL_S = 0.02

Found = TypeVar("Found")


class Daemon(Protocol):
    """An MPS daemon to run workers under."""

    @property
    def control(self) -> Control:
        """Its commands."""

    def start(self) -> None:
        """Have it ready for clients. Raises `BackendUnavailable`. Does nothing the second time."""

    def stop(self) -> None:
        """Be done with it. May be called again."""


class OwnDaemon:
    """A daemon for one device, which no other process uses unless it is told the pipe directory.

    Also a context manager. A process that ends without `stop` stops it on its way out.

    Args:
        device: UUID, ``GPU-...``.
        static: static SM partitions instead of percentages.
        base: where the directory is made; by default ``XDG_RUNTIME_DIR`` or the directory of temporary files.
        start_s: longest wait for a server that takes clients; on machines without the persistence daemon it first
            initialises the device.
        stop_s: longest wait for clients at the end, and for processes that were told to end.
    """

    def __init__(
        self,
        device: str,
        *,
        static: bool = False,
        program: str = PROGRAM,
        base: Path | None = None,
        timeout_s: float = 10.0,
        start_s: float = 30.0,
        stop_s: float = 5.0,
    ) -> None:
        self._device, self._static, self._program = device, static, program
        self._bases = _bases() if base is None else (base,)
        self._timeout_s, self._start_s, self._stop_s = timeout_s, start_s, stop_s
        self._home: Path | None = None

    @property
    def control(self) -> Control:
        """Its commands. Raises `BackendUnavailable` while it does not run."""
        if self._home is None:
            raise BackendUnavailable("the MPS daemon is not running: start it first")
        return self._control(self._home)

    def start(self) -> None:
        """Start daemon and server, after removing what dead owners left. Raises `BackendUnavailable`; then nothing is
        left of it.
        """
        if self._home is not None:
            return
        for base in self._bases:
            sweep(base, program=self._program, timeout_s=self._timeout_s, stop_s=self._stop_s)
        self._home = _make_home(self._bases)
        atexit.register(self._stop_at_exit, os.getpid())
        try:
            self._launch(self._control(self._home))
        except BaseException as error:
            log = "" if not isinstance(error, SmpartError) else _tail(self._home / "log")
            self.stop()
            if log:
                raise BackendUnavailable(f"{error}; its log ends with: {log}") from None
            raise

    def stop(self) -> None:
        """End the daemon and its servers, and remove its directory.

        Raises:
            BackendUnavailable: one of them cannot be ended; its process id is in the message.
        """
        if self._home is None:
            return
        home, self._home = self._home, None
        atexit.unregister(self._stop_at_exit)
        _end(self._control(home), self._stop_s)
        shutil.rmtree(home, ignore_errors=True)

    def __enter__(self) -> OwnDaemon:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _launch(self, control: Control) -> None:
        control.launch(self._device, static=self._static)
        until = time.monotonic() + self._start_s
        while not _answers(control):
            if not (_processes_of(control.pipe) or is_live(control.pipe)):
                raise BackendUnavailable(f"the MPS daemon ended as soon as it had started in {control.pipe}")
            if time.monotonic() > until:
                raise BackendUnavailable(f"the MPS daemon did not answer within {self._start_s:g} s")
            time.sleep(_POLL_S)
        control.start_server(os.getuid())
        if not _await(lambda: _has_active_server(control), until):
            raise BackendUnavailable(f"the MPS server took no clients within {self._start_s:g} s")

    def _control(self, home: Path) -> Control:
        return Control(home / "pipe", home / "log", program=self._program, timeout_s=self._timeout_s)

    def _stop_at_exit(self, owner: int) -> None:
        if os.getpid() == owner:  # not in a forked child
            self.stop()


class ForeignDaemon:
    """A daemon that somebody else started. It is never stopped, and none of its settings is changed.

    Args:
        pipe: its pipe directory.
    """

    def __init__(self, pipe: Path, *, program: str = PROGRAM, timeout_s: float = 10.0) -> None:
        self.control = Control(pipe, program=program, timeout_s=timeout_s)

    def start(self) -> None:
        """Check that it answers and limits no client: a lower limit of its own would win over ours.

        Raises:
            BackendUnavailable: it does not answer, or it limits its clients.
        """
        limits = {self.control.default_percentage(), *map(self.control.percentage, self.control.servers())}
        if min(limits) < 100:
            raise BackendUnavailable(
                f"the MPS daemon in {self.control.pipe} gives each client at most {min(limits):g} % of the device: "
                "ask its owner for set_default_active_thread_percentage 100, or let smpart start its own (mps)"
            )

    def stop(self) -> None:
        """Nothing: it is not ours."""


def foreign_pipe(environ: Mapping[str, str] = os.environ) -> Path:
    """Pipe directory that CUDA programs in this environment use."""
    return Path(environ.get(PIPE_VARIABLE) or DEFAULT_PIPE)


def is_live(pipe: Path) -> bool:
    """Whether a daemon runs in a pipe directory, as its process id file says."""
    try:
        return Process.of(int((pipe / PID_FILE).read_text())) is not None
    except (OSError, ValueError):
        return False


@dataclass(frozen=True, slots=True, order=True)
class Process:
    """A process, told apart from later ones with the same id by when it started (clock ticks after boot)."""

    pid: int
    started: int

    @classmethod
    def of(cls, pid: int) -> Process | None:
        """The process that has this id now; None if there is none, or if it has ended and is only not reaped yet."""
        try:
            fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        except OSError:
            return None
        return None if fields[0] in (b"Z", b"X") else cls(pid, int(fields[19]))

    def runs(self) -> bool:
        """Whether it still does."""
        return Process.of(self.pid) == self

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal, if it still runs and may be signalled."""
        if self.runs():
            try:
                os.kill(self.pid, number)
            except OSError as error:
                logger.warning("process %d cannot be ended: %s", self.pid, error)


def sweep(base: Path, *, program: str = PROGRAM, timeout_s: float = 10.0, stop_s: float = 5.0) -> None:
    """End the daemons of dead owners and remove their directories. What cannot be ended is logged and left alone."""
    for home in sorted(base.glob("smpart-mps-*")):
        found = re.fullmatch(r"smpart-mps-(\d+)-(\d+)-(\d+)-\w+", home.name)
        # A directory of another process-id namespace (another container's) may have a living owner that we cannot see.
        if found is None or int(found[1]) != _namespace() or home.lstat().st_uid != os.getuid():
            continue
        owner = Process(int(found[2]), int(found[3]))
        if owner.runs():
            continue
        logger.info("removing %s: its owner, process %d, is gone", home, owner.pid)
        control = Control(home / "pipe", home / "log", program=program, timeout_s=timeout_s)
        try:
            _end(control, stop_s)
            shutil.rmtree(home, ignore_errors=True)
        except BackendUnavailable as error:
            logger.warning("%s stays: %s", home, error)


def _end(control: Control, stop_s: float) -> None:
    """Have the daemon quit; then end those of its processes that did not end with it."""
    processes = _processes_of(control.pipe)
    try:
        control.quit(stop_s)
    except NoDaemon:
        pass
    except BackendUnavailable as error:
        logger.warning("the MPS daemon in %s did not quit when asked: %s", control.pipe, error)
    else:
        if _ended(processes, stop_s):
            return
    for number in (signal.SIGTERM, signal.SIGKILL):
        for process in processes:
            process.signal(number)
        if _ended(processes, stop_s):
            return
    left = ", ".join(str(process.pid) for process in sorted(processes) if process.runs())
    raise BackendUnavailable(f"MPS process {left} of {control.pipe} could not be ended: end it by hand")


def _ended(processes: Iterable[Process], within_s: float) -> bool:
    return _await(lambda: not any(process.runs() for process in processes), time.monotonic() + within_s)


def _answers(control: Control) -> bool:
    try:
        control.servers()
    except NoDaemon:
        return False
    return True


def _has_active_server(control: Control) -> bool:
    return any(control.server_status(server) == "ACTIVE" for server in control.servers())


def _processes_of(pipe: Path) -> frozenset[Process]:
    """MPS daemons and servers (not clients) that were started with this pipe directory."""
    mark = os.fsencode(f"{PIPE_VARIABLE}={pipe}")
    found = set()
    for entry in os.scandir("/proc"):
        if not entry.name.isdecimal():
            continue
        try:
            variables = Path(entry.path, "environ").read_bytes().split(b"\0")
            words = Path(entry.path, "cmdline").read_bytes().split(b"\0")
        except OSError:  # ended meanwhile, or somebody else's
            continue
        if mark in variables and any(b"nvidia-cuda-mps-" in word for word in words[:4]):
            found.add(Process.of(int(entry.name)))
    return frozenset(process for process in found if process is not None)


def _await(look: Callable[[], Found], until: float) -> Found:
    """Look until there is something to see, or time is up; once at least."""
    while not (found := look()) and time.monotonic() < until:
        time.sleep(_POLL_S)
    return found


def _bases() -> tuple[Path, ...]:
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    return (*([Path(runtime)] if runtime else []), Path(tempfile.gettempdir()))


def _make_home(bases: Iterable[Path]) -> Path:
    me = Process.of(os.getpid())
    assert me is not None
    prefix = f"smpart-mps-{_namespace()}-{me.pid}-{me.started}-"
    reasons = []
    for base in bases:
        if len(os.fsencode(base / (prefix + "x" * 8) / "pipe" / _LONGEST_NAME)) > _LONGEST_SOCKET:
            reasons.append(f"{base} is too long a path for sockets")
            continue
        try:
            home = Path(tempfile.mkdtemp(prefix=prefix, dir=base))  # mode 0700
        except OSError as error:
            reasons.append(f"{base}: {error.strerror}")
            continue
        (home / "pipe").mkdir(mode=0o700)
        (home / "log").mkdir(mode=0o700)
        return home
    raise BackendUnavailable(f"no place for an MPS pipe directory ({'; '.join(reasons)}): set TMPDIR to a short path")


def _namespace() -> int:
    return Path("/proc/self/ns/pid").stat().st_ino


def _tail(log: Path, lines: int = 3) -> str:
    for name in ("server.log", "control.log"):
        try:
            said = (log / name).read_text(errors="replace").split("\n")
        except OSError:
            continue
        last = [line.strip() for line in said if line.strip()][-lines:]
        if last:
            return " / ".join(last)
    return ""
