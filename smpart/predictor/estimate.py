"""The contract between whoever predicts latency and whoever plans with it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from smpart.partition import Shape, Split

Floats = NDArray[np.float64]


class Estimate(NamedTuple):
    """Predicted seconds: the expected value, and the upper bound that plans are made on."""

    mean: float
    upper: float


class Sides(NamedTuple):
    """Both sides of candidate splits, each beside the other: seconds, float64[splits] each.

    Attributes:
        step, step_upper: the decode step: expected value and upper bound.
        head, head_upper: the prefill, likewise.
    """

    step: Floats
    step_upper: Floats
    head: Floats
    head_upper: Floats


NOTHING = Shape()
"""The neighbour of a lane that runs alone."""


class Predictor(Protocol):
    """Predicts how long a forward takes; learns from what it really took."""

    @property
    def drifted(self) -> str | None:
        """In words, how forwards lastingly contradict what was measured of them beforehand; None: they do not."""

    def predict(self, shape: Shape, units: int, neighbour: Shape = NOTHING) -> Estimate:
        """Seconds of the whole forward of `shape` on `units` units beside `neighbour` (running all the while)."""

    def observe(self, shape: Shape, units: int, neighbour: Shape, fraction: float, seconds: float) -> None:
        """Learn from a completed piece: `fraction` of the forward took `seconds`."""

    def predict_splits(self, step: Shape, head: Shape, splits: Sequence[Split]) -> Sides:
        """What `predict` says of both sides of each split: `step` on its decode units beside `head` on the others.

        Args:
            step: decode rows and nothing else.
            head: prompt tokens and nothing else.
            splits: both lanes of each with units.

        Raises:
            ValueError: other shapes or splits: such choices have no two sides.
        """


def require_sides(step: Shape, head: Shape) -> None:
    """Raise the `ValueError` of `Predictor.predict_splits` about shapes that are not a lane's."""
    if not step.decode_batch or step.prefill_tokens or not head.prefill_tokens or head.decode_batch:
        raise ValueError(f"a decode step beside a prefill, not {step} beside {head}")


def require_shared(splits: Sequence[Split]) -> None:
    """Raise the `ValueError` of `Predictor.predict_splits` about splits that give one lane everything."""
    if not all(split.prefill and split.decode for split in splits):
        raise ValueError(f"splits with two lanes, not {', '.join(map(str, splits))}")


def split_by_split(predictor: Predictor, step: Shape, head: Shape, splits: Sequence[Split]) -> Sides:
    """`Predictor.predict_splits` for predictors that have no faster way."""
    require_sides(step, head)
    require_shared(splits)
    both = np.empty((4, len(splits)))
    for column, split in zip(both.T, splits, strict=True):
        column[:2] = predictor.predict(step, split.decode, head)
        column[2:] = predictor.predict(head, split.prefill, step)
    return Sides(*both)
