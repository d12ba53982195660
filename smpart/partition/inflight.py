"""What every pair of lanes checks before it takes a work."""

from __future__ import annotations

from collections.abc import Iterable

from smpart.errors import EngineClosed, UsageError
from smpart.partition.split import Disjoint, Side, Split, nested
from smpart.partition.work import Work


class Inflight:
    """Works of a pair of lanes that are launched and not complete, and whether one more may join them.

    Not thread-safe: its owner holds a lock.

    Args:
        splits: those the lanes can realise.
        depth: works of one side that may be in flight at once.
        disjoint: see `Lanes.disjoint`.
        overlapping: see `Lanes.overlapping`.
    """

    def __init__(
        self, splits: Iterable[Split], depth: int, disjoint: Disjoint = nested, overlapping: Iterable[Split] = ()
    ) -> None:
        self._splits = frozenset(splits)
        self._overlapping = frozenset(overlapping)
        self._depth = depth
        self._disjoint = disjoint
        self._prefill: dict[int, Split] = {}
        self._decode: dict[int, Split] = {}
        self._closed = False
        self._checked: Split | None = None

    def add(self, work: Work) -> None:
        """Take a work in.

        Raises:
            UsageError: no such split, nothing for the work's side in it, a fraction outside (0, 1], an id that is in
                flight already, a full side, or units that a work of the other side still has.
            EngineClosed: after `close`.
        """
        if self._closed:
            raise EngineClosed("the lanes are closed; open new ones")
        split = work.split
        if split is not self._checked:
            self._check(split)
            self._checked = split
        if work.side is Side.PREFILL:
            units, mine, others = split.prefill, self._prefill, self._decode
        else:
            units, mine, others = split.decode, self._decode, self._prefill
        if units == 0:
            raise UsageError(f"work {work.id}: split {split} gives {work.side} nothing")
        if not 0.0 < work.fraction <= 1.0:
            raise UsageError(f"work {work.id}: fraction {work.fraction} is not in (0, 1]")
        if work.id in mine or work.id in others:
            raise UsageError(f"work {work.id} is in flight already; give each work an id of its own")
        if len(mine) >= self._depth:
            raise UsageError(f"work {work.id}: {work.side} has {len(mine)} works in flight; wait for a completion")
        for other in others.values():
            prefill, decode = (split, other) if work.side is Side.PREFILL else (other, split)
            if not self._disjoint(prefill, decode):
                raise UsageError(f"work {work.id}: split {split} overlaps units that {work.side.other} is still using")
        mine[work.id] = split

    def remove(self, work: Work) -> None:
        """Let go of a completed (or lost) work."""
        del (self._prefill if work.side is Side.PREFILL else self._decode)[work.id]

    def resize(self, split: Split) -> None:
        """Put everything in flight on another split. Raises `UsageError` if there is no such split."""
        self._check(split)
        self._prefill = dict.fromkeys(self._prefill, split)
        self._decode = dict.fromkeys(self._decode, split)

    def close(self) -> None:
        """Refuse every work from now on."""
        self._closed = True

    def _check(self, split: Split) -> None:
        if split not in self._splits and split not in self._overlapping:
            raise UsageError(
                f"split {split} does not exist here; there are {', '.join(map(str, sorted(self._splits)))}"
            )
