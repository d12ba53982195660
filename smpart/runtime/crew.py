"""Who works for a pair of lanes in processes: one worker a side, one for both, or many; and what each is told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from smpart.partition.cores import CorePlacement
from smpart.partition.device import Device
from smpart.partition.feasible import overlapping_splits
from smpart.partition.split import Side, Split, nested_or_overlapping
from smpart.partition.work import Work
from smpart.runtime.worker import Init, Task


@dataclass(frozen=True, slots=True)
class Seat:
    """A worker of a crew: the process may be replaced.

    Attributes:
        name: for messages, for example "the decode lane's worker".
        entry: ``module:function`` that it runs.
        follows: whether it is started only when the crew's first one is ready.
    """

    name: str
    entry: str
    follows: bool = False


class Crew(Protocol):
    """How the workers behind `ProcessLanes` are made and spoken to. A worker goes by its place in `seats`.

    Attributes:
        seats: all of them. The first may hold what the others need: it ends last.
    """

    seats: Sequence[Seat]

    @property
    def device(self) -> Device:
        """The device whose units are shared out."""

    def splits(self) -> tuple[Split, ...]:
        """Every split that can be realised, in order of `Split.prefill`; known once all are ready."""

    def overlapping(self) -> tuple[Split, ...]:
        """See `Lanes.overlapping`."""

    def disjoint(self, prefill: Split, decode: Split) -> bool:
        """See `Lanes.disjoint`."""

    def seat(self, side: Side, split: Split) -> int:
        """Who runs the works of a side under a split."""

    def fatal(self, seat: int, code: int) -> bool:
        """Whether, with a worker that ended with this exit code, the KV memory is lost, and all others with it."""

    def fds(self, seat: int) -> Sequence[int]:
        """Descriptors that a new worker gets, behind its channel and the segments."""

    def first_message(self, seat: int, segments: Sequence[str], last: Work | None) -> Any:
        """What a new worker is sent; `last` is the last work of the one it replaces."""

    def ready(self, seat: int, info: Any) -> None:
        """A worker is ready."""

    def message(self, work: Work) -> Any:
        """What a worker is sent for a work."""

    def before_kill(self, pid: int) -> None:
        """A worker with work under way is about to be killed."""

    def realised(self, side: Side, pid: int, last: Work | None) -> frozenset[int]:
        """Unit ids that a side is on now; `last` is its last work."""


class CoreCrew:
    """Two workers on CPU cores.

    Args:
        device: its `unit_ids` are what splits share out.
        splits: every split of the device that can be realised.
        body: ``module:function`` of a `ProcessBodyFactory`, imported and called in each worker.
        placement: which CPUs each side of a split has, and whether sides may overlap.
        args: picklable, passed to the body's factory.
    """

    seats: Sequence[Seat] = tuple(Seat(f"the {side} lane's worker", "smpart.runtime.worker:main") for side in Side)

    def __init__(
        self, device: Device, splits: Sequence[Split], body: str, placement: CorePlacement, args: Any = None
    ) -> None:
        self.device = device
        self._splits = tuple(sorted(splits))
        self._body = body
        self._placement = placement
        self._overlapping = overlapping_splits(self._splits) if placement.overlap else ()
        self._disjoint = nested_or_overlapping(device.units)
        self._args = args

    def splits(self) -> tuple[Split, ...]:
        """Every split that can be realised."""
        return self._splits

    def overlapping(self) -> tuple[Split, ...]:
        """Every pair of shares with cores in common: the system's scheduler shares those out."""
        return self._overlapping

    def disjoint(self, prefill: Split, decode: Split) -> bool:
        """Cores have fixed positions."""
        return self._disjoint(prefill, decode)

    def seat(self, side: Side, split: Split) -> int:
        """One a side."""
        return _SIDES.index(side)

    def fatal(self, seat: int, code: int) -> bool:
        """The KV memory is a segment: it outlives every worker."""
        return False

    def fds(self, seat: int) -> Sequence[int]:
        """None."""
        return ()

    def first_message(self, seat: int, segments: Sequence[str], last: Work | None) -> Init:
        """See `Crew`. A replacement must not build its body on the neighbour's cores."""
        everywhere = frozenset(cpu for core in self._placement.cores for cpu in core.cpus)
        init = Init(_SIDES[seat], self._body, self._args, tuple(segments), everywhere, self.device.units)
        if last is None:
            return init
        return replace(init, cpus=self._placement.cpus(last.side, last.split), units=last.units)

    def ready(self, seat: int, info: Any) -> None:
        """Nothing more is to be known."""

    def message(self, work: Work) -> Task:
        """See `Crew`."""
        return Task(work.id, self._placement.cpus(work.side, work.split), work.units, work.payload)

    def before_kill(self, pid: int) -> None:
        """It may be killed at any moment."""

    def realised(self, side: Side, pid: int, last: Work | None) -> frozenset[int]:
        """Unit ids that any thread of the side's worker may run on, read back from /proc."""
        return self._placement.read_back(pid)


_SIDES = tuple(Side)
