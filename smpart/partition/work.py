"""A piece of work handed to a lane, and the word that comes back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from smpart.partition.shape import Shape
from smpart.partition.split import Side, Split


@dataclass(frozen=True, slots=True)
class Work:
    """One launch: a decode or hybrid step, or one layer group of a prefill.

    Attributes:
        side: the lane that runs it (a hybrid step runs on the decode lane with the whole device).
        split: the split under which it was launched; its side's units are this work's, and nobody else's.
        shape: size of the whole forward this is a piece of.
        fraction: share of that forward's cost in this piece, in (0, 1].
        payload: what the lane's body is given. Opaque here.
    """

    id: int
    side: Side
    split: Split
    shape: Shape
    fraction: float
    payload: Any

    @property
    def units(self) -> int:
        """Units this work runs on."""
        return self.split.units(self.side)


@dataclass(frozen=True, slots=True)
class LaneFault:
    """Why a piece of work has no result.

    Attributes:
        lost: the lane's worker died (and was replaced): nothing of its unfinished work was kept.
            False: the body raised and the lane goes on.
    """

    message: str
    lost: bool


@dataclass(frozen=True, slots=True)
class Completion:
    """The end of one piece of work. Times are seconds on the lanes' clock, taken where the work ran."""

    work: Work
    started: float
    finished: float
    result: Any = None
    fault: LaneFault | None = None

    @property
    def seconds(self) -> float:
        """How long it ran, waiting in the lane excluded."""
        return self.finished - self.started
