"""Two streams and no split: each phase launches when it is ready, and both see every unit of the device.

Source: the baseline that semi-PD calls (100, 100) (its section 7.2.2), `stream` in pegainfer; the engine chooses
nothing. Simplified: decode's higher stream priority, which Bullet's code sets, is left out. What becomes of two works
on the same units is the hardware's (on `cores` the operating system's) business; `smpart.sim.sharing` states what the
simulator assumes. Prompts come first, first served, the short ones packed, each forward in one piece.
"""

from __future__ import annotations

from smpart.errors import UsageError
from smpart.partition import Shape, Split
from smpart.scheduler.pair import TwoLanes, Work
from smpart.scheduler.registry import Setup, register
from smpart.scheduler.snapshot import Snapshot


@register("overlap")
class Overlap(TwoLanes):
    """``overlap``. Lanes that cannot share units are refused."""

    name = "overlap"
    ahead = True

    def __init__(self, setup: Setup) -> None:
        setup.nothing(self.name)
        if setup.splits:
            whole(setup.splits, setup.overlapping)

    def split_for(self, snapshot: Snapshot, step: Shape, work: Work) -> Split:
        """Everything to both."""
        return whole(snapshot.splits, snapshot.overlapping)

    def alone(self, snapshot: Snapshot, step: Shape, work: Work) -> Split:
        """The same, for the other phase may begin at any moment."""
        return whole(snapshot.splits, snapshot.overlapping)

    def layers(self, snapshot: Snapshot, step: Shape, work: Work, split: Split) -> int | None:
        """All."""
        return None


def whole(splits: tuple[Split, ...], overlapping: tuple[Split, ...]) -> Split:
    """The whole device for both phases. Raises `UsageError` where there is no such split.

    >>> str(whole((Split(0, 2), Split(1, 1), Split(2, 0)), (Split(2, 1), Split(2, 2))))
    '2/2'
    """
    split = Split(splits[0].total, splits[0].total)
    if split not in overlapping:
        raise UsageError("policy overlap: these lanes cannot share their units; backends cores and sim:<gpu> can")
    return split
