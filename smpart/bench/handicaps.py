"""Predictors with a handicap: what prediction is worth is what is lost without it."""

from __future__ import annotations

from collections.abc import Sequence

from smpart.partition import Shape, Split
from smpart.predictor import OnlinePredictor
from smpart.predictor.estimate import NOTHING, Estimate, Sides
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
