"""Work on its way: prefill forwards that were started, and launches that have not come back."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from smpart.engine.request import Request
from smpart.partition import Completion, Shape, Split, Work
from smpart.scheduler.snapshot import ForwardView
from smpart.scheduler.table import RequestTable, State

_NOTHING = Shape()


@dataclass(frozen=True, slots=True)
class Part:
    """Tokens ``start .. start + length`` of one row in a forward; `sample` if its last known token is among them."""

    row: int
    start: int
    length: int
    sample: bool


@dataclass(eq=False, slots=True)
class Forward:
    """A packed prefill that runs in layer groups on the prefill lane.

    Attributes:
        split: that it was started under.
        body: that which it was started in, and goes on in nowhere else (see `Lanes.body`).
    """

    id: int
    parts: tuple[Part, ...]
    shape: Shape
    layers_left: int
    started: float
    split: Split
    body: Hashable
    inflight: int = 0

    def view(self) -> ForwardView:
        """What the policy sees of it."""
        rows, lengths = zip(*((p.row, p.length) for p in self.parts), strict=True)
        return ForwardView(self.id, rows, lengths, self.shape, self.layers_left, self.inflight, self.started)


class Cohort:
    """Decode rows that step together, and what stays as it is from one step of theirs to the next.

    Attributes:
        rows: in batch order.
        slots: their board slots.
        body: that which knows all their samplers (see `Lanes.body`).
        left: steps until the first of them reaches its output limit, those in flight not counted.
        readers: their requests, if nothing is to be done for any of them but to note its token, else empty; None: not
            looked at yet.
    """

    __slots__ = ("_landed", "_launched", "_table", "body", "left", "readers", "rows", "slots")

    def __init__(self, table: RequestTable, rows: NDArray[np.intp], body: Hashable = None) -> None:
        self.rows, self.slots, self.body = rows, table.slot[rows], body
        self.readers: list[Request] | None = None
        self.left = 0
        self._table = table
        self._launched, self._landed = table.places(rows, _LAUNCHED), table.places(rows, _LANDED)

    def __len__(self) -> int:
        return len(self.rows)

    def launched(self) -> None:
        """A step of theirs is on its way."""
        self._table.add(self._launched, _LAUNCH)

    def landed(self) -> None:
        """One has come back, with a token each."""
        self._table.add(self._landed, _LAND)

    def none_leaves(self) -> bool:
        """Whether all of them decode on."""
        return self._table.state[self.rows].tobytes().count(_RUNNING) == len(self.rows)


_LAUNCHED, _LAUNCH = RequestTable.stepped("computed", "ahead", "flying"), np.array([1, 1, 1], dtype=np.int32)
_LANDED = RequestTable.stepped("known", "outputs", "ahead", "flying")
_LAND = np.array([1, 1, -1, -1], dtype=np.int32)
_RUNNING = int(State.RUNNING)


@dataclass(eq=False, slots=True)
class Flight:
    """One launched work and what to do when it lands.

    Attributes:
        cohort: the decode rows.
        parts: prefill parts (of the whole forward this is a group of).
        forward: the prefill forward this is a group of; None for a step.
        last: whether the forward ends with it.
        expected: predicted end, seconds.
        ready: since when the lane had work waiting and ran nothing; None if it had none.
        follows: launched behind another work of the same lane.
        plain: a step at whose end no row of the cohort reaches its output limit.
    """

    work: Work
    cohort: Cohort
    parts: tuple[Part, ...]
    forward: Forward | None
    last: bool
    expected: float
    ready: float | None
    follows: bool
    plain: bool


@dataclass(slots=True)
class LaneTrack:
    """What the core knows of one lane: flights in launch order, its past, and what it last ran beside.

    Attributes:
        ready_since: since when the idle lane owns units and has work waiting; None otherwise.
        past: recent completions, newest last, to find out what the neighbour of a piece of work was.
    """

    flights: list[Flight] = field(default_factory=list)
    last_finished: float = 0.0
    ready_since: float | None = None
    past: list[Completion] = field(default_factory=list)

    def neighbour_of(self, started: float, finished: float) -> Shape | None:
        """What ran here between two moments: one shape, nothing (the empty shape), or a mixture (None).

        A neighbour counts if it was there for four fifths of the time; under a fifth counts as nothing.
        """
        span = max(finished - started, 1e-9)
        if not self.flights and not (self.past and self.past[-1].finished > started):
            return _NOTHING
        found, share = _NOTHING, 0.0
        for completion in reversed(self.past):
            if completion.finished <= started:
                break
            share += max(0.0, min(finished, completion.finished) - max(started, completion.started)) / span
            found = completion.work.shape
        if self.flights:
            begun = max(started, self.past[-1].finished if self.past else started)
            share += max(0.0, finished - begun) / span
            found = self.flights[0].work.shape
        if share >= 0.8:
            return found
        return _NOTHING if share <= 0.2 else None

    def landed(self, completion: Completion) -> None:
        """Remember a completion; only the recent past matters."""
        self.last_finished = max(self.last_finished, completion.finished)
        self.past.append(completion)
        if len(self.past) > 64:
            del self.past[:32]
