"""Notices that a profile is no longer true: a shift of the times that is real and lasts, not noise."""

from __future__ import annotations

import math
from collections import deque
from statistics import median

_RARE, _OFTEN = 0.1, 0.5
"""Shares of forwards beyond the profile's bound: what noise may do, and what a shift by as much as the bound does."""
_GAIN = math.log(_OFTEN / _RARE)
_LOSS = math.log((1.0 - _RARE) / (1.0 - _OFTEN))
PATIENCE = 20
"""Forwards in a row beyond the bound that raise the alarm; what is over sooner is a burst."""
_ALARM = PATIENCE * _GAIN - 1e-9
_REMEMBERED = 32
_NOTICED = math.log(1.1)
"""A shift by less is not worth a word, however narrow the bound: corrections make up for it."""


class Drift:
    """A two-sided Bernoulli CUSUM (Reynolds and Stoumbos 1999) on which forwards are beyond the profile's bound.

    Only the sign counts, not the size, so that no outlier however large weighs more than another. While at most a
    tenth of the forwards is beyond the bound on one side, the chance that a false alarm grows from any one of them is
    under exp(-32) (Wald). The sums are capped at the alarm, so that it ends once what it was about has gone away.

    Attributes:
        side: 1: forwards take lastingly longer than the profile says, -1: shorter, 0: neither.
        run: forwards since the first one of the present shift.
    """

    __slots__ = ("_over", "_recent", "_under", "run", "side")

    def __init__(self) -> None:
        self._over = self._under = 0.0
        self._recent: deque[float] = deque(maxlen=_REMEMBERED)
        self.side = 0
        self.run = 0

    def learn(self, ratio: float, bound: float) -> bool:
        """Take one forward in; whether `side` has changed.

        Args:
            ratio: log of what it took over what the profile says.
            bound: log width within which the profile says it is true.
        """
        self._recent.append(ratio)
        bound = max(bound, _NOTICED)
        over, under = self._over, self._under
        if ratio > bound:
            over += _GAIN
        elif over > 0.0:
            over -= _LOSS
        if ratio < -bound:
            under += _GAIN
        elif under > 0.0:
            under -= _LOSS
        self._over, self._under = over, under
        if over <= 0.0 and under <= 0.0:
            self.run = 0
            if self.side == 0:
                return False
        else:
            self.run += 1
        return self._settle(over, under)

    @property
    def factor(self) -> float:
        """What forwards take of late, as a multiple of what the profile says."""
        return math.exp(median(list(self._recent)[-max(1, self.run) :]))

    def _settle(self, over: float, under: float) -> bool:
        self._over, self._under = min(max(over, 0.0), _ALARM), min(max(under, 0.0), _ALARM)
        side = self.side
        if (side > 0 and over <= 0.0) or (side < 0 and under <= 0.0):
            side = 0
        if over >= _ALARM:
            side = 1
        elif under >= _ALARM:
            side = -1
        changed, self.side = side != self.side, side
        return changed
