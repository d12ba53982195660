"""The contract of a pair of lanes: what every backend and executor offers, and the conformance suite checks."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Protocol, runtime_checkable

from smpart.partition.device import Device
from smpart.partition.split import Side, Split
from smpart.partition.work import Completion, Work


@runtime_checkable
class Body(Protocol):
    """What a lane does with a payload. One body a lane, used by one thread at a time, in launch order."""

    def run(self, payload: Any) -> Any:
        """Execute one payload and return its result. An exception fails this work only."""

    def close(self) -> None:
        """Free what the body holds."""


BodyFactory = Callable[[Side], Body]


class Lanes(Protocol):
    """Two lanes of one device that run at once.

    Works of one side run in launch order. A work runs on exactly its own split's side. The caller sees to it
    (with `Line`) that works of the two sides that are in flight together own disjoint units; lanes refuse
    what overlaps with `UsageError`, unless it was asked for (`overlapping`).
    """

    device: Device
    depth: int
    """Works of one side that may be in flight (running or queued) at once."""

    @property
    def epoch(self) -> int:
        """Grows when what earlier works wrote is lost: a device's memory dies with the process that holds it."""

    def body(self, side: Side, split: Split) -> Hashable:
        """Which body runs a side's works under a split: another value is another body, or a new one in its place.

        A body knows only the samplers that it was told itself, and a forward that pauses in it goes on nowhere else.
        Where a side has several bodies, the engine launches every forward whole.
        """

    def splits(self) -> tuple[Split, ...]:
        """Every split that can be realised, the two exclusive ones included, in order of `Split.prefill`."""

    def overlapping(self) -> tuple[Split, ...]:
        """Splits besides whose sides have units in common: only for whoever asks for sharing by planning one.

        Empty where lanes cannot share units. The two sides of these, and of no others, may run at once on one unit.
        """

    def disjoint(self, prefill: Split, decode: Split) -> bool:
        """Whether prefill under one split and decode under another may run at once.

        They own no unit together, or both splits are among `overlapping`.
        """

    def now(self) -> float:
        """Seconds on this pair's clock (monotonic; virtual lanes have a virtual one)."""

    def launch(self, work: Work) -> None:
        """Queue one work; never blocks. Raises `UsageError` if the side is full or the units overlap."""

    def wait(self, until: float | None) -> list[Completion]:
        """Block until a completion, a `wake`, or the clock reaches `until` (None: no limit); all completions so far.

        Virtual lanes advance their clock instead of blocking; with nothing in flight and no `until` they return at
        once.
        """

    def wake(self) -> None:
        """End a `wait` in another thread, now or the next one. Safe from any thread."""

    def realised(self, side: Side) -> frozenset[int]:
        """Unit ids the side's worker is on at the moment, read back from the system."""

    def close(self) -> None:
        """End workers, free memory. Idempotent. Queued work is dropped."""
