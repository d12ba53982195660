"""The moving line between the lanes: which side may launch on what, so that no unit is ever shared."""

from __future__ import annotations

from smpart.partition.split import Side, Split


class Line:
    """Tracks works in flight and answers under which split a side may launch next.

    A new split is a *target*. The shrinking side takes it at its next launch; the growing side keeps its old
    share until every work of the other side that owns units it wants has completed. With an exclusive or hybrid
    target the side that gets nothing may not launch at all.

    >>> line = Line(4, Split(4, 0))
    >>> line.launched(1, Side.PREFILL, Split(4, 0))
    >>> line.target = Split(3, 1)
    >>> line.grant(Side.DECODE) is None          # prefill still runs on all four units
    True
    >>> line.completed(1)
    >>> line.grant(Side.DECODE)
    Split(prefill=3, decode=1)
    """

    def __init__(self, total: int, target: Split) -> None:
        self.total = total
        self.target = target
        self._flying: dict[int, tuple[Side, Split]] = {}
        self._held: dict[Side, Split] = {Side.PREFILL: target, Side.DECODE: target}

    def inflight(self, side: Side) -> int:
        """Works of one side launched and not completed."""
        return sum(1 for flying, _ in self._flying.values() if flying is side)

    def free(self, side: Side, split: Split) -> bool:
        """Whether a side may launch under `split` without touching a unit in use by the other side."""
        mine = split.indices(side, self.total)
        return all(_disjoint(mine, s.indices(o, self.total)) for o, s in self._flying.values() if o is not side)

    def grant(self, side: Side) -> Split | None:
        """The split under which `side` may launch now, or None if it must wait or owns nothing."""
        if self.target.units(side) == 0:
            return None
        if self.free(side, self.target):
            return self.target
        held = self._held[side]
        shrinks = 0 < held.units(side) < self.target.units(side)
        return held if shrinks and self.free(side, held) else None

    def launched(self, work_id: int, side: Side, split: Split) -> None:
        """Record a launch. The caller got `split` from `grant`."""
        self._flying[work_id] = (side, split)
        self._held[side] = split

    def completed(self, work_id: int) -> None:
        """Record a completion (or a loss)."""
        self._flying.pop(work_id, None)


def _disjoint(a: range, b: range) -> bool:
    return a.stop <= b.start or b.stop <= a.start or not a or not b
