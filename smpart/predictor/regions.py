"""What was learnt of forwards, from fine to coarse: a region, its relatives on other units, all forwards of a kind."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from smpart.predictor.drift import Drift
from smpart.predictor.residuals import LASTING, Level, Margin

Floats = NDArray[np.float64]

_BACKING = 0.5
"""How many observations the coarser level counts for beside the finer one, at least."""
_NOISE, _MOST_BACKING = 0.07, 4.0
"""A prior counts for as many observations as noise of this bound (log) is wider than its own, squared; so many at most.
"""
TRUSTED = 8
"""Residuals before a bound may become narrower than the prior's own."""
_ENOUGH = 64
"""Residuals of one region from which on it has a bound of its own."""


class Kind:
    """All forwards of one phase beside one phase, or alone, and on each number of units.

    Args:
        units: units of the whole device.

    Attributes:
        coarse: the correction of all of them.
        margin: their bound.
        drift: whether they contradict the profile.
        version: how often anything was learnt.
    """

    __slots__ = ("_by_units", "_counts", "_finer", "_means", "_summed", "coarse", "drift", "margin", "version")

    def __init__(self, units: int) -> None:
        self.coarse, self.margin, self.drift = Level(), Margin(), Drift()
        self.version = self._summed = 0
        self._finer: dict[int, Level] = {}
        self._counts, self._means = np.zeros(units + 1), np.zeros(units + 1)
        self._by_units: Floats = np.ones(units + 1)

    def learn(self, units: int, value: float) -> Level:
        """Learn a correction; what is known of so many units."""
        finer = self._finer.get(units)
        if finer is None:
            finer = self._finer[units] = Level()
        self.coarse.learn(value)
        finer.learn(value)
        self._counts[units], self._means[units] = finer.count, finer.mean
        self.version += 1
        return finer

    def folded(self, units: int) -> float:
        """The log correction of forwards on so many units that nothing finer is known of."""
        finer, mean = self._finer.get(units), self.coarse.mean
        if finer is None:
            return mean
        return (finer.count * finer.mean + _BACKING * mean) / (finer.count + _BACKING)

    def factors(self) -> Floats:
        """The exponential of `folded` by units: float64[units of the whole device + 1], not to be written to."""
        if self._summed != self.version:
            sums = self._counts * self._means + _BACKING * self.coarse.mean
            self._by_units, self._summed = np.exp(sums / (self._counts + _BACKING)), self.version
        return self._by_units


class Family:
    """Regions that differ in their units alone: their corrections and bounds as arrays.

    Args:
        kind: that of their forwards.
        units: units of the whole device.
    """

    __slots__ = ("_factors", "_filled", "_version", "_widens", "kind")

    def __init__(self, kind: Kind, units: int) -> None:
        self.kind = kind
        self._factors, self._widens = np.full(units + 1, np.nan), np.full(units + 1, np.nan)
        self._filled, self._version = self._factors, -1

    def put(self, units: int, factor: float, widen: float) -> None:
        """What one of them says now; `widen` is NaN while it has no bound of its own."""
        self._factors[units], self._widens[units] = factor, widen

    def factors(self) -> Floats:
        """Corrections by units, those of the kind where no region was seen: not to be written to."""
        if self._version != self.kind.version:
            unseen = np.isnan(self._factors)
            self._filled, self._version = np.where(unseen, self.kind.factors(), self._factors), self.kind.version
        return self._filled

    def widens(self, units: NDArray[np.intp], first: float) -> Floats:
        """Bounds over the expected time on so many units each, `first` where a region has none of its own."""
        own = self._widens[units]
        return np.where(np.isnan(own), first, own)


class Region:
    """Forwards of one phase, number of units and coarse size (and of one kind of neighbour): what is known of them.

    Args:
        family: that they belong to.
        units: what they run on.
        bound: log width of the prior's own bound here.

    Attributes:
        log: correction of the prior, backed by the coarser levels as they were when the region was last seen.
        factor: its exponential.
        margin: the bound that holds here: its own once there is enough of it, otherwise that of its kind.
    """

    __slots__ = ("_family", "_level", "_own", "_units", "bound", "factor", "log", "margin")

    def __init__(self, family: Family, units: int, bound: float) -> None:
        self._family, self._units = family, units
        self.bound = bound
        self.log = 0.0
        self.factor = 1.0
        self.margin = family.kind.margin
        self._level = Level()
        self._own: Margin | None = None

    def residual(self, value: float) -> None:
        """Learn how far off a prediction was."""
        own = self._own
        if own is not self.margin:
            self._family.kind.margin.learn(value)
        if own is not None:
            own.learn(value)
            if own.count == _ENOUGH:
                self.margin = own
        elif self._level.count >= TRUSTED:
            self._own = Margin()

    def learn(self, value: float) -> None:
        """Learn a correction, here and at the coarser levels, and fold what they all say."""
        level, kind = self._level, self._family.kind
        finer, coarse = kind.learn(self._units, value), kind.coarse
        if level.learn(value):
            self._forget()
        trust = _NOISE / self.bound if self.bound > 0.0 else _MOST_BACKING
        trust = min(trust * trust, _MOST_BACKING)
        backing = _BACKING + trust
        log = coarse.count * coarse.mean / (coarse.count + trust)
        log = (finer.count * finer.mean + backing * log) / (finer.count + backing)
        self.log = log = (level.count * level.mean + backing * log) / (level.count + backing)
        self.factor = math.exp(log)
        self._family.put(self._units, self.factor, self.margin.widen if self.margin is self._own else math.nan)

    def _forget(self) -> None:
        """The last residuals told of a change that is now learnt."""
        kind = self._family.kind
        kind.margin.forget(LASTING)
        self._own, self.margin = None, kind.margin
