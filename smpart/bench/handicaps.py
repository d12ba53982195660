"""Predictors with a handicap: what prediction is worth is what is lost without it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from smpart.partition import Shape, Split
from smpart.predictor import OnlinePredictor
from smpart.predictor.estimate import NOTHING, Estimate, Floats, Sides
from smpart.predictor.online import Prior


class Unlearning(OnlinePredictor):
    """Believes its prior, whatever it sees."""

    def observe(self, shape: Shape, units: int, neighbour: Shape, fraction: float, seconds: float) -> None:
        """Nothing is learnt."""


class Unguarded(OnlinePredictor):
    """Has no upper bounds: plans are made on what is expected."""

    def predict(self, shape: Shape, units: int, neighbour: Shape = NOTHING) -> Estimate:
        """The expected time, twice."""
        mean = super().predict(shape, units, neighbour).mean
        return Estimate(mean, mean)

    def predict_splits(self, step: Shape, head: Shape, splits: Sequence[Split]) -> Sides:
        """Likewise."""
        sides = super().predict_splits(step, head, splits)
        return Sides(sides.step, sides.step, sides.head, sides.head)


class Wrong(OnlinePredictor):
    """Off by a factor that no observation mends.

    Args:
        prefill, decode: told seconds over learnt ones, for forwards with prompt tokens and for those without.
    """

    def __init__(self, prior: Prior, prefill: float, decode: float) -> None:
        super().__init__(prior)
        self._prefill, self._decode = prefill, decode

    def predict(self, shape: Shape, units: int, neighbour: Shape = NOTHING) -> Estimate:
        """What was learnt, times the factor."""
        told, factor = super().predict(shape, units, neighbour), self._prefill if shape.prefill_tokens else self._decode
        return Estimate(told.mean * factor, told.upper * factor)

    def predict_splits(self, step: Shape, head: Shape, splits: Sequence[Split]) -> Sides:
        """Likewise."""
        sides = super().predict_splits(step, head, splits)
        factors = (self._decode, self._decode, self._prefill, self._prefill)
        return Sides(*(side * factor for side, factor in zip(sides, factors, strict=True)))


class Skewed:
    """A prior that is off by a factor: a profile of another day, which observations mend.

    Args:
        prefill, decode: as `Wrong` takes them.
    """

    def __init__(self, prior: Prior, prefill: float, decode: float) -> None:
        self.units = prior.units
        self._prior, self._prefill, self._decode = prior, prefill, decode

    def seconds(self, shape: Shape, units: int) -> float:
        """What the prior says, times the factor."""
        return self._prior.seconds(shape, units) * (self._prefill if shape.prefill_tokens else self._decode)

    def both_sides(self, step: Shape, head: Shape, splits: tuple[Split, ...]) -> Floats:
        """Likewise."""
        sides: Floats = self._prior.both_sides(step, head, splits) * np.array([[self._decode], [self._prefill]])
        return sides

    def contention(self, shape: Shape, units: int, neighbour: Shape, neighbour_units: int) -> float:
        """What the prior says."""
        return self._prior.contention(shape, units, neighbour, neighbour_units)

    def margin(self, shape: Shape, beside: bool) -> float:
        """What the prior says."""
        return self._prior.margin(shape, beside)
