"""Backend `cores`: lanes on physical cores of the CPU, disjoint unless sharing is asked for."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection, Iterable

from smpart.errors import UsageError
from smpart.partition.affinity import pin_process, pin_self, pin_tids, read_process, read_tids, threads_of
from smpart.partition.backend import Backend
from smpart.partition.cgroups import memory_available
from smpart.partition.cpu import Core, Cpus
from smpart.partition.device import Device
from smpart.partition.feasible import feasible_splits
from smpart.partition.registry import register
from smpart.partition.split import Side, Split


class CorePlacement:
    """Where each side of a split lies among a machine's cores, and the pinning that puts it there.

    For a worker process of its own: it calls `pin_self` before the first work of another split, or somebody else
    calls `pin_process`. For threads of this process there is `ThreadPlacement`.

    Args:
        overlap: whether splits with more units than there are cores can be placed: their sides have cores in common.
    """

    def __init__(self, cores: tuple[Core, ...], overlap: bool = False) -> None:
        self.cores = cores
        self.overlap = overlap
        self._unit = {cpu: core.id for core in cores for cpu in core.cpus}

    def cpus(self, side: Side, split: Split) -> frozenset[int]:
        """CPUs of one side of a split, every hardware thread of its cores.

        Raises:
            UsageError: the split is not one of these cores, or gives the side nothing.
        """
        total = len(self.cores)
        shared = self.overlap and split.overlaps(total) and max(split.prefill, split.decode) <= total
        if total == 1 and not split.exclusive and not shared:
            raise UsageError(f"split {split}: only one core is usable here, and it cannot be split; use 1/0 or 0/1")
        if split.total != total and not shared:
            raise UsageError(f"split {split} is not one of {total} core(s): write two numbers that add up to {total}")
        if split.units(side) == 0:
            raise UsageError(f"split {split} gives {side} no core")
        return frozenset(cpu for i in split.indices(side, total) for cpu in self.cores[i].cpus)

    def units(self, cpus: Iterable[int]) -> frozenset[int]:
        """Unit ids that CPUs belong to. A CPU of no unit stands for itself, so that a stray thread shows."""
        return frozenset(self._unit.get(cpu, cpu) for cpu in cpus)

    def pin_self(self, side: Side, split: Split) -> None:
        """Pin every thread of the calling process to one side. Raises `UsageError`, `BackendUnavailable`."""
        pin_self(self.cpus(side, split))

    def pin_process(self, pid: int, side: Side, split: Split) -> None:
        """Pin every thread of a live process. Raises also `ProcessLookupError` if it is gone."""
        pin_process(pid, self.cpus(side, split))

    def read_back(self, pid: int) -> frozenset[int]:
        """Unit ids that any thread of a process may run on. Raises `ProcessLookupError` if it is gone."""
        return self.units(read_process(pid))


class ThreadPlacement:
    """`Placement` for lanes that are threads of this process.

    Args:
        set_num_threads: called on a lane's thread, already pinned, with the number of cores it now has. It must
            bring the calling thread's team of compute threads (OpenMP) to that size *and start it*: threads that
            appear during the call with the lane's mask are taken to be its team, and move with it from then on.
    """

    def __init__(self, cores: CorePlacement, set_num_threads: Callable[[int], None]) -> None:
        self._cores = cores
        self._set_num_threads = set_num_threads
        self._teams: dict[Side, set[int]] = {}
        self._one_at_a_time = threading.Lock()

    def place(self, side: Side, split: Split) -> None:
        """Move the calling lane's thread and team. Raises `UsageError`, `BackendUnavailable`."""
        cpus = self._cores.cpus(side, split)
        with self._one_at_a_time:
            team = self._teams.setdefault(side, set())
            team.add(threading.get_native_id())
            pin_tids(team, cpus)
            before = threads_of(os.getpid())
            team &= before
            self._set_num_threads(split.units(side))
            team |= _pinned_to(cpus, threads_of(os.getpid()) - before)

    def realised(self, side: Side) -> frozenset[int]:
        """Unit ids of the lane's team; empty before its first work."""
        with self._one_at_a_time:
            return self._cores.units(read_tids(self._teams.get(side, ())))


def _pinned_to(cpus: Collection[int], tids: Iterable[int]) -> set[int]:
    return {tid for tid in tids if read_tids([tid]) == cpus}


class Cores:
    """The `Backend`."""

    name = "cores"

    def __init__(self, cpus: Cpus, memory_bytes: int) -> None:
        self._cpus = cpus
        self._memory_bytes = memory_bytes

    def device(self) -> Device:
        """The usable cores; a unit id is the smallest CPU number of its core."""
        cpus = self._cpus
        return Device(
            name=cpus.name,
            kind="cpu",
            units=len(cpus.cores),
            unit_ids=tuple(core.id for core in cpus.cores),
            memory_bytes=self._memory_bytes,
            facts={
                "allowed_cpus": list(cpus.allowed),
                "quota_cpus": cpus.quota,
                "threads_per_core": max(len(core.cpus) for core in cpus.cores),
            },
        )

    def splits(self) -> tuple[Split, ...]:
        """Every way to share out whole cores; with one core only the two exclusive ones."""
        return feasible_splits(len(self._cpus.cores))

    def placement(self, *, overlap: bool = False) -> CorePlacement:
        """Where the sides of a split lie among the cores, for whoever runs the lanes."""
        return CorePlacement(self._cpus.cores, overlap)

    def why_unusable(self) -> str | None:
        """None: a CPU is always there, though one core alone cannot be split."""
        return None


@register("cores", kind="cpu", rank=10)
def open_cores(argument: str) -> Backend:
    """The cores and the memory this process may really use."""
    return Cores(Cpus.usable(), memory_available())
