"""The two things that are learnt from residuals: a running mean that outliers move little, and a bound that covers."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque

_SLOWEST_RATE = 0.06
"""Weight of a new observation once many have been seen."""
_HINT, _LASTING = 4, 8
"""Innovations in a row beyond the limit, all to one side: no longer clipped; what was learnt before is forgotten."""
_COVERAGE = 0.97
_WINDOW = 128
"""Residuals that a bound is taken from."""
_WIDEST = 1.5
"""No single residual widens a bound by more than this (log)."""
_NARROWEST = 0.01


class Level:
    """A running mean of log ratios that outliers move little, and that still follows a real change at once.

    The first few observations count by recency, so that a slow first one is soon forgotten. After that an innovation
    is clipped to a few times the usual one, unless several in a row point the same way.

    Attributes:
        count: observations so far.
    """

    __slots__ = ("_age", "_spread", "_streak", "count", "mean")

    def __init__(self) -> None:
        self.count = self._age = 0
        self.mean = 0.0
        self._spread = 0.1
        self._streak = 0

    def learn(self, value: float) -> bool:
        """Take one in; whether it is now clear that what was learnt before no longer holds."""
        innovation = value - self.mean
        forgotten = False
        age = self._age
        if age >= 4:
            size = innovation if innovation > 0.0 else -innovation
            limit = 3.0 * self._spread + 0.02
            streak = 0
            if size > limit:
                sign = 1 if innovation > 0.0 else -1
                self._streak = self._streak + sign if self._streak * sign > 0 else sign
                streak = self._streak * sign
                if streak < _HINT:
                    innovation = sign * limit
                elif streak == _LASTING:
                    forgotten, age = True, 1
                size = limit
            elif self._streak:
                self._streak = 0
            if streak < 2:  # more of them to one side tell of a shift, not of noise
                self._spread += 0.1 * ((size if size < 1.0 else 1.0) - self._spread)
        age += 1
        self._age = age
        self.count += 1
        self.mean += (_SLOWEST_RATE if age > 32 else 2.0 / (age + 1)) * innovation
        return forgotten


LASTING = _LASTING
"""Residuals of a change, by the time that it is clear."""


class Margin:
    """The quantile of recent residuals that an upper bound needs (split conformal, over a sliding window).

    Attributes:
        count: residuals it is taken from.
        widest: the residual that the bound is; a bound is at least 1 % over the expected time.
        widen: the bound over the expected time.
    """

    __slots__ = ("_recent", "_sorted", "count", "widen", "widest")

    def __init__(self) -> None:
        self._recent: deque[float] = deque()
        self._sorted: list[float] = []
        self.count = 0
        self.widest = 0.0
        self.widen = 1.0

    def learn(self, residual: float) -> None:
        """Take one in: log of what was measured over what was expected."""
        residual = -_WIDEST if residual < -_WIDEST else _WIDEST if residual > _WIDEST else residual
        ordered, recent = self._sorted, self._recent
        recent.append(residual)
        insort(ordered, residual)
        if self.count == _WINDOW:
            del ordered[bisect_left(ordered, recent.popleft())]
        else:
            self.count += 1
        widest = ordered[_RANKS[self.count]]
        if widest != self.widest:
            self._widen(widest)

    def forget(self, last: int) -> None:
        """Take the last few back: they told of a change, not of how good predictions are."""
        for _ in range(min(last, self.count)):
            del self._sorted[bisect_left(self._sorted, self._recent.pop())]
            self.count -= 1
        self._widen(self._sorted[_RANKS[self.count]] if self.count else 0.0)

    def _widen(self, widest: float) -> None:
        self.widest, self.widen = widest, math.exp(max(_NARROWEST, widest))


def _rank(count: int) -> int:
    """Place, among so many residuals in ascending order, of the one that a bound is."""
    rank = min(count, math.ceil((count + 1) * _COVERAGE)) - 1
    return rank - 1 if count > 32 and rank == count - 1 else rank  # too few to tell one outlier from the tail


_RANKS = [_rank(count) for count in range(_WINDOW + 1)]
