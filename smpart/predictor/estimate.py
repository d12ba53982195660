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
        """What `predict` says of both sides of each split: `step` on its decode units beside `head` on the others."""


def split_by_split(predictor: Predictor, step: Shape, head: Shape, splits: Sequence[Split]) -> Sides:
    """`Predictor.predict_splits` for predictors that have no faster way."""
    steps = [predictor.predict(step, split.decode, head) for split in splits]
    heads = [predictor.predict(head, split.prefill, step) for split in splits]
    return Sides(*(np.array(values) for values in (*zip(*steps, strict=True), *zip(*heads, strict=True))))
