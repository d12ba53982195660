"""The contract between whoever predicts latency and whoever plans with it."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from smpart.partition import Shape


class Estimate(NamedTuple):
    """Predicted seconds: the expected value, and the upper bound that plans are made on."""

    mean: float
    upper: float


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
