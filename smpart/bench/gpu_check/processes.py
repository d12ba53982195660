"""A stage's processes: started as a session of their own, watched, and ended together."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import monotonic, sleep

_LOOK_S = 0.1
_GRACE_S = 3.0
"""Seconds between asking a stage to end and ending it."""


def watch(
    command: Sequence[str], log: Path, environment: Mapping[str, str], seconds: float, memory_bytes: int
) -> str | None:
    """Run a command until it ends, or one of its limits does.

    Args:
        log: takes what it prints.
        memory_bytes: that it and its children may have on the host, what they share left out.

    Returns:
        None if it ended with status 0 or 1, else what became of it.
    """
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=dict(environment),
            start_new_session=True,
        )
    try:
        why = _until_over(process, monotonic() + seconds, seconds, memory_bytes)
    finally:
        _end(process)
    if why is None and process.returncode not in (0, 1):
        code = process.returncode
        return f"it was ended by {signal.Signals(-code).name}" if code < 0 else f"it ended with status {code}"
    return why


def _until_over(process: subprocess.Popen[bytes], end: float, seconds: float, memory_bytes: int) -> str | None:
    while process.poll() is None:
        if monotonic() > end:
            return f"it was not done after {seconds:.0f} s"
        held = _memory(process.pid)
        if held > memory_bytes:
            return f"it took {held >> 20} MiB of memory, more than {memory_bytes >> 20} MiB"
        sleep(_LOOK_S)
    return None


def _end(process: subprocess.Popen[bytes]) -> None:
    """End everything of its session; first politely, so that it can stop what it started elsewhere."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_S)
    for pid in _session(process.pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def _session(leader: int) -> list[int]:
    """Living processes of a session, zombies left out."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            with contextlib.suppress(OSError, IndexError):
                state, _parent, _group, session, *_ = (folder / "stat").read_text().rpartition(")")[2].split()
                if int(session) == leader and state != "Z":
                    found.append(int(folder.name))
    return found


def _memory(leader: int) -> int:
    """Anonymous memory of a session's processes, in bytes."""
    total = 0
    for pid in _session(leader):
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
            total += sum(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon:"))
    return total
