"""The moving line between the lanes: which side may launch on what, so that no unit is shared unless asked for."""

from __future__ import annotations

from smpart.partition.split import Disjoint, Side, Split, nested


class Line:
    """Tracks works in flight and answers under which split a side may launch next.

    A new split is a *target*. A side takes it at its next launch if that touches nothing the other side still runs
    on. Where the splits of a device are nested, the shrinking side can do that at once, and the growing side goes on
    with its old share until it can. Where two sides may run at once only under one and the same split, prefill
    pauses until decode has moved; there a target must rest for as long as one work lasts, or neither would get to it.
    With an exclusive or hybrid target the side that gets nothing may not launch.

    Args:
        target: the first split.
        disjoint: see `Lanes.disjoint`.

    >>> line = Line(Split(4, 0))
    >>> line.launched(1, Side.PREFILL, Split(4, 0))
    >>> line.target = Split(3, 1)
    >>> line.grant(Side.DECODE) is None          # prefill still runs on all four units
    True
    >>> line.completed(1)
    >>> line.grant(Side.DECODE)
    Split(prefill=3, decode=1)
    """

    def __init__(self, target: Split, disjoint: Disjoint = nested) -> None:
        self.target = target
        self._disjoint = disjoint
        self._flying: dict[int, tuple[Side, Split]] = {}
        self._held: dict[Side, Split] = {Side.PREFILL: target, Side.DECODE: target}

    def inflight(self, side: Side) -> int:
        """Works of one side launched and not completed."""
        return sum(1 for flying, _ in self._flying.values() if flying is side)

    def free(self, side: Side, split: Split) -> bool:
        """Whether a side may launch under `split` without touching a unit in use by the other side."""
        others = [other for flying, other in self._flying.values() if flying is not side]
        if side is Side.PREFILL:
            return all(self._disjoint(split, other) for other in others)
        return all(self._disjoint(other, split) for other in others)

    def grant(self, side: Side) -> Split | None:
        """The split under which `side` may launch now, or None if it must wait or owns nothing."""
        if self.target.units(side) == 0:
            return None
        if not self._flying or self.free(side, self.target):
            return self.target
        held = self._held[side]
        # Prefill on its old share must leave decode a way to the target, or neither would ever get there.
        goes_on = side is Side.DECODE or self._disjoint(held, self.target)
        return held if held.units(side) and goes_on and self.free(side, held) else None

    def launched(self, work_id: int, side: Side, split: Split) -> None:
        """Record a launch. The caller got `split` from `grant`."""
        self._flying[work_id] = (side, split)
        self._held[side] = split

    def completed(self, work_id: int) -> None:
        """Record a completion (or a loss)."""
        self._flying.pop(work_id, None)
