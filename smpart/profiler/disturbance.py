"""Tells repeats that something else disturbed: by their own times, by anchors, and by what the system says.

Three kinds of evidence. A repeat far slower than the others of its point. An *anchor*, the same two forwards in each
round, that takes longer than it did in the rounds before. And other work on the lanes' CPUs, as the kernel counts it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_TIMES = 5.0
"""Deviations, in units of the usual one, beyond which a repeat is disturbed."""
_FLOOR = 0.02
"""The usual deviation is taken to be no less than this (log): a few repeats may lie close by chance."""
_TO_SIGMA = 1.4826
"""Of a normal distribution, sigma over the median absolute deviation."""
_FEWEST = 3
_RECENT, _KNOWN = 30, 5


def spread(values: Sequence[float]) -> float:
    """Robust standard deviation of positive values in log space: 1.4826 times the median absolute deviation.

    >>> spread([1.0, 1.0, 1.0, 9.0])
    0.0
    """
    logs = np.log(np.asarray(values, dtype=np.float64))
    return float(_TO_SIGMA * np.median(np.abs(logs - np.median(logs))))


def disturbed(seconds: Sequence[float], noise: float = 0.0) -> NDArray[np.bool_]:
    """Which repeats of one point are disturbed: far slower than the others. Never so many that none is left.

    Only slow ones: nothing outside makes a forward faster than it is, so where many were disturbed, the fast ones
    tell the truth.

    Args:
        noise: the machine's own, see `Anchors.noise`.

    >>> disturbed([1.0, 1.01, 0.99, 1.6]).tolist()
    [False, False, False, True]
    """
    if len(seconds) < _FEWEST:
        return np.zeros(len(seconds), dtype=np.bool_)
    logs = np.log(np.asarray(seconds, dtype=np.float64))
    limit = _TIMES * max(spread(seconds), noise, _FLOOR)
    return np.asarray(logs - np.median(logs) > limit)


class Anchors:
    """Forwards that are measured in each round: how much the machine differs from itself."""

    def __init__(self) -> None:
        self._recent: dict[str, deque[float]] = {}
        self._off: deque[float] = deque(maxlen=200)

    def learn(self, name: str, seconds: float) -> None:
        """An anchor took so long in a round."""
        recent = self._recent.setdefault(name, deque(maxlen=_RECENT))
        if len(recent) >= _FEWEST:
            self._off.append(abs(math.log(seconds / float(np.median(recent)))))
        recent.append(seconds)

    @property
    def noise(self) -> float:
        """Robust standard deviation (log) of an anchor from what it usually takes; 0 as long as nothing is known."""
        return float(_TO_SIGMA * np.median(self._off)) if len(self._off) >= _KNOWN else 0.0

    def off(self, name: str, seconds: float) -> bool:
        """Whether an anchor takes longer than noise explains. Not before some rounds are known."""
        recent = self._recent.get(name, ())
        if len(recent) < _KNOWN:
            return False
        return math.log(seconds / float(np.median(recent))) > _TIMES * max(self.noise, _FLOOR)
