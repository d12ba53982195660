"""Who works for a pair of lanes in processes: one worker a side, or one for both; and what each is told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

from smpart.partition.cores import CorePlacement
from smpart.partition.device import Device
from smpart.partition.split import Side, Split, nested
from smpart.partition.work import Work
from smpart.runtime.worker import Init, Task


class Crew(Protocol):
    """How the workers behind `ProcessLanes` are made and spoken to.

    Attributes:
        entry: ``module:function`` that a worker process runs.
        teams: the sides that each worker serves.
        forgets: whether the KV memory is lost with a worker.
    """

    entry: str
    teams: Sequence[tuple[Side, ...]]
    forgets: bool

    @property
    def device(self) -> Device:
        """The device whose units are shared out."""

    def splits(self) -> tuple[Split, ...]:
        """Every split that can be realised, in order of `Split.prefill`; known once all are ready."""

    def disjoint(self, prefill: Split, decode: Split) -> bool:
        """See `Lanes.disjoint`."""

    def first_message(self, sides: tuple[Side, ...], segments: Sequence[str], last: Work | None) -> Any:
        """What a new worker is sent; `last` is the last work of the one it replaces."""

    def ready(self, info: Any) -> None:
        """A worker is ready."""

    def message(self, work: Work) -> Any:
        """What a worker is sent for a work."""

    def realised(self, side: Side, pid: int, last: Work | None) -> frozenset[int]:
        """Unit ids that a side is on now; `last` is its last work."""


class CoreCrew:
    """Two workers on CPU cores.

    Args:
        device: its `unit_ids` are what splits share out.
        splits: every split of the device that can be realised.
        body: ``module:function`` of a `ProcessBodyFactory`, imported and called in each worker.
        placement: which CPUs each side of a split has.
        args: picklable, passed to the body's factory.
    """

    entry = "smpart.runtime.worker:main"
    teams: Sequence[tuple[Side, ...]] = ((Side.PREFILL,), (Side.DECODE,))
    forgets = False

    def __init__(
        self, device: Device, splits: Sequence[Split], body: str, placement: CorePlacement, args: Any = None
    ) -> None:
        self.device = device
        self._splits = tuple(sorted(splits))
        self._body = body
        self._placement = placement
        self._args = args

    def splits(self) -> tuple[Split, ...]:
        """Every split that can be realised."""
        return self._splits

    def disjoint(self, prefill: Split, decode: Split) -> bool:
        """Cores have fixed positions."""
        return nested(prefill, decode)

    def first_message(self, sides: tuple[Side, ...], segments: Sequence[str], last: Work | None) -> Init:
        """See `Crew`. A replacement must not build its body on the neighbour's cores."""
        everywhere = frozenset(cpu for core in self._placement.cores for cpu in core.cpus)
        init = Init(sides[0], self._body, self._args, tuple(segments), everywhere, self.device.units)
        if last is None:
            return init
        return replace(init, cpus=self._placement.cpus(last.side, last.split), units=last.units)

    def ready(self, info: Any) -> None:
        """Nothing more is to be known."""

    def message(self, work: Work) -> Task:
        """See `Crew`."""
        return Task(work.id, self._placement.cpus(work.side, work.split), work.units, work.payload)

    def realised(self, side: Side, pid: int, last: Work | None) -> frozenset[int]:
        """Unit ids that any thread of the side's worker may run on, read back from /proc."""
        return self._placement.read_back(pid)
