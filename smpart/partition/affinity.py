"""Pins the threads of a live process to CPUs, and reads back where they are.

Linux cuts a mask silently down to what the cpuset allows, so each pin is read back and a difference is an error.
A thread inherits the mask of the one that starts it, so once a whole scan finds nobody astray, nobody will be.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from pathlib import Path

from smpart.errors import BackendUnavailable


def threads_of(pid: int) -> frozenset[int]:
    """Thread ids of a process. Raises `ProcessLookupError` if it is gone."""
    try:
        return frozenset(int(entry.name) for entry in Path(f"/proc/{pid}/task").iterdir())
    except FileNotFoundError:
        raise ProcessLookupError(f"process {pid} is gone") from None


def pin_tids(tids: Iterable[int], cpus: Collection[int]) -> None:
    """Pin threads; those that ended meanwhile are passed over.

    Raises:
        BackendUnavailable: the system does not let a thread run on exactly `cpus`.
    """
    wanted = set(cpus)
    for tid in tids:
        try:
            os.sched_setaffinity(tid, wanted)
            given = os.sched_getaffinity(tid)
        except ProcessLookupError:
            continue
        except OSError as error:
            raise BackendUnavailable(f"cannot pin thread {tid} to CPUs {sorted(wanted)}: {error.strerror}") from error
        if given != wanted:
            raise BackendUnavailable(
                f"asked for CPUs {sorted(wanted)}, the system gave {sorted(given)}: check the cpuset"
            )


def pin_process(pid: int, cpus: Collection[int]) -> None:
    """Pin every thread of a live process, those it starts meanwhile included.

    Raises:
        BackendUnavailable: as `pin_tids`.
        ProcessLookupError: the process is gone.
    """
    there: tuple[frozenset[int], ...] = (frozenset(cpus), frozenset())
    while astray := [tid for tid in threads_of(pid) if read_tids([tid]) not in there]:
        pin_tids(astray, cpus)


def pin_self(cpus: Collection[int]) -> None:
    """Pin every thread of the calling process."""
    pin_process(os.getpid(), cpus)


def read_tids(tids: Iterable[int]) -> frozenset[int]:
    """CPUs that any of the threads may run on; threads that ended count for nothing."""
    cpus: set[int] = set()
    for tid in tids:
        try:
            cpus |= os.sched_getaffinity(tid)
        except ProcessLookupError:
            continue
    return frozenset(cpus)


def read_process(pid: int) -> frozenset[int]:
    """CPUs that any thread of a process may run on. Raises `ProcessLookupError` if it is gone."""
    return read_tids(threads_of(pid))
