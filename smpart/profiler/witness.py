"""What the system says about others on the lanes' CPUs or GPU while something was measured."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from smpart.errors import BackendUnavailable
from smpart.partition import Lanes
from smpart.partition.cuda import nvml

OTHERS, STOLEN, STALLED = 0.1, 0.05, 0.1
"""Share of the CPUs' time that others may use, that the hypervisor may steal, and in which we may wait for a CPU."""
_TELLING_S = 0.2
"""The kernel counts in ticks of 10 ms: over less than this it tells nothing."""


class Witness(Protocol):
    """Watches from one mark to the next."""

    def mark(self) -> Any:
        """The state of things now."""

    def objection(self, since: Any) -> str | None:
        """What disturbed the lanes since a mark, in words; None if nothing is known to have."""


class NoWitness:
    """Where nothing can disturb (virtual time), or nobody tells."""

    def mark(self) -> None:
        """Nothing to remember."""

    def objection(self, since: None) -> None:
        """Nothing to say."""


class Counted(NamedTuple):
    """Seconds up to a moment: of all CPUs together, of our processes, and in which our tasks waited for a CPU."""

    moment: float
    busy: float
    stolen: float
    own: float
    stalled: float


@dataclass(frozen=True, slots=True)
class HostWitness:
    """Other work on some CPUs, from `/proc` and the control group's pressure file. What is not there says nothing.

    Args:
        cpus: those the lanes run on.
        pids: of the lanes' processes, now.
        root: where `proc` and `sys` are looked for.
    """

    cpus: Collection[int]
    pids: Callable[[], Sequence[int]]
    root: Path = Path("/")
    now: Callable[[], float] = time.monotonic

    def mark(self) -> Counted:
        """See `Witness`."""
        busy, stolen = self._busy()
        own = sum(map(self._used, {*self.pids(), os.getpid()}))
        return Counted(self.now(), busy, stolen, own, self._stalled())

    def objection(self, since: Counted) -> str | None:
        """See `Witness`."""
        now = self.mark()
        elapsed = now.moment - since.moment
        if elapsed < _TELLING_S:
            return None
        whole = elapsed * len(self.cpus)
        others = (now.busy - since.busy - (now.own - since.own)) / whole
        stolen, stalled = (now.stolen - since.stolen) / whole, (now.stalled - since.stalled) / elapsed
        if others > OTHERS:
            return f"others used {others:.0%} of the CPUs"
        if stolen > STOLEN:
            return f"the hypervisor took {stolen:.0%} of the CPUs"
        return f"the lanes waited for a CPU {stalled:.0%} of the time" if stalled > STALLED else None

    def _busy(self) -> tuple[float, float]:
        busy = stolen = 0
        with suppress(OSError, ValueError, IndexError):
            for line in (self.root / "proc/stat").read_text().splitlines():
                name, *fields = line.split()
                if name.startswith("cpu") and name[3:].isdecimal() and int(name[3:]) in self.cpus:
                    user, nice, system, _, _, irq, softirq, steal = map(int, fields[:8])
                    busy += user + nice + system + irq + softirq
                    stolen += steal
        return busy / _HZ, stolen / _HZ

    def _used(self, pid: int) -> float:
        with suppress(OSError, ValueError, IndexError):
            fields = (self.root / f"proc/{pid}/stat").read_text().rpartition(")")[2].split()
            return (int(fields[11]) + int(fields[12])) / _HZ
        return 0.0

    def _stalled(self) -> float:
        """Of this control group only: the whole machine's says nothing of our CPUs."""
        with suppress(OSError, ValueError, IndexError):
            line = (self.root / "sys/fs/cgroup/cpu.pressure").read_text().splitlines()[0]
            return int(line.rpartition("total=")[2]) / 1e6
        return 0.0


_HZ = os.sysconf("SC_CLK_TCK")
_USUAL = frozenset({"application clocks", "power cap", "sync boost"})
"""What holds a GPU's clocks down in ordinary work."""


@dataclass(frozen=True, slots=True)
class GpuWitness:
    """A GPU that is too hot, or slowed down by its board, as NVML tells it."""

    uuid: str

    def mark(self) -> None:
        """See `Witness`: only the present counts."""

    def objection(self, since: None) -> str | None:
        """See `Witness`."""
        with suppress(BackendUnavailable):
            held = sorted({*(nvml.clocks(self.uuid).throttled or ())} - _USUAL)
            return f"the GPU's clocks are held down ({', '.join(held)})" if held else None
        return None


def witness_of(lanes: Lanes) -> Witness:
    """Whoever can tell about lanes of this kind."""
    device = lanes.device
    pids = getattr(lanes, "pids", None)
    if device.kind == "cpu" and pids is not None:
        allowed = device.facts.get("allowed_cpus", device.unit_ids)
        return HostWitness(frozenset(allowed), pids)  # type: ignore[call-overload]
    uuid = device.facts.get("uuid")
    return GpuWitness(uuid) if device.kind == "cuda" and isinstance(uuid, str) else NoWitness()
