"""The CPU cores this process may really use: affinity mask, hyperthreads and cgroup quota taken together."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from smpart.partition.cgroups import cpu_quota

_ROOT = Path("/")


@dataclass(frozen=True, slots=True)
class Core:
    """One physical core.

    Attributes:
        id: its smallest usable CPU number: the unit id.
        cpus: its hardware threads that this process may run on, ascending.
    """

    id: int
    cpus: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Cpus:
    """What a process may use of a machine's CPUs.

    Attributes:
        cores: usable cores, socket by socket; no more of them than the quota can keep busy.
        allowed: CPUs of the affinity mask.
        quota: CPUs' worth of time the cgroup allows, None for no limit.
        name: the processor's model name.
    """

    cores: tuple[Core, ...]
    allowed: tuple[int, ...]
    quota: float | None
    name: str

    @classmethod
    def usable(cls, root: Path = _ROOT, affinity: Iterable[int] | None = None) -> Cpus:
        """Find out for this process.

        Args:
            root: where `proc` and `sys` are looked for.
            affinity: CPUs allowed; None asks the kernel.
        """
        allowed = tuple(sorted(os.sched_getaffinity(0) if affinity is None else affinity))
        quota = cpu_quota(root)
        cores = _physical(root, allowed)
        # A lane runs one thread a core, so a core asks for one CPU's worth of the quota.
        count = len(cores) if quota is None else min(len(cores), max(1, int(quota)))
        return cls(cores[:count], allowed, quota, _model_name(root))


def _physical(root: Path, allowed: tuple[int, ...]) -> tuple[Core, ...]:
    """Cores by (socket, number): neighbours in the order share a socket, so that most splits keep to one."""
    found: dict[tuple[int, ...], tuple[int, Core]] = {}
    for cpu in allowed:
        topology = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
        cpus = tuple(sorted((_siblings(topology) | {cpu}) & set(allowed)))
        found.setdefault(cpus, (_socket(topology), Core(cpus[0], cpus)))
    return tuple(core for _, core in sorted(found.values(), key=lambda pair: (pair[0], pair[1].id)))


def _siblings(topology: Path) -> frozenset[int]:
    for name in ("core_cpus_list", "thread_siblings_list"):
        try:
            return parse_cpu_list((topology / name).read_text())
        except OSError:
            continue
    return frozenset()


def _socket(topology: Path) -> int:
    try:
        return int((topology / "physical_package_id").read_text())
    except OSError:
        return 0


def _model_name(root: Path) -> str:
    try:
        lines = (root / "proc/cpuinfo").read_text().splitlines()
    except OSError:
        return "cpu"
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "cpu")


def parse_cpu_list(text: str) -> frozenset[int]:
    """The kernel's list format.

    >>> sorted(parse_cpu_list("0-2,8"))
    [0, 1, 2, 8]
    """
    cpus: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus)
