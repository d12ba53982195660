"""One phase of forwards alone: its physics, times what physics leaves; and where a forward of it lies."""

from __future__ import annotations

from typing import Self

import numpy as np
from numpy.typing import NDArray

from smpart.predictor.estimators.base import Floats, column
from smpart.predictor.estimators.physics import Physics
from smpart.predictor.estimators.residual import Residual

PREFILL, DECODE, HYBRID = 1, 2, 3
NAMES = {PREFILL: "prefill", DECODE: "decode step", HYBRID: "hybrid step"}


def phases(X: Floats) -> NDArray[np.intp]:  # noqa: N803
    """What each row's forward is: `PREFILL`, `DECODE` or `HYBRID`; 0: nothing."""
    found: NDArray[np.intp] = (column(X, "prefill_tokens") > 0).astype(np.intp) + 2 * (column(X, "decode_batch") > 0)
    return found


def prefill_place(X: Floats) -> Floats:  # noqa: N803
    """Where a prefill lies: log2 of its tokens, and of the tokens each of them attends to on average."""
    tokens = np.maximum(column(X, "prefill_tokens"), 1.0)
    return np.column_stack([np.log2(tokens), np.log2(1.0 + column(X, "prefill_pairs") / tokens)])


def decode_place(X: Floats) -> Floats:  # noqa: N803
    """Where a decode step lies: log2 of its sequences, and of the tokens each of them attends to on average."""
    rows = np.maximum(column(X, "decode_batch"), 1.0)
    return np.column_stack([np.log2(rows), np.log2(1.0 + column(X, "decode_context") / rows)])


def with_context(place: Floats, context: Floats) -> Floats:
    """A place, and log2 of all tokens in memory: what grows with those alone is then smooth along one coordinate."""
    return np.column_stack([place, np.log2(1.0 + context)])


class Phase:
    """Log seconds = log of a non-negative sum of amounts + a residual over place and units.

    Args:
        whole: units of the whole device.
    """

    def __init__(self, whole: float) -> None:
        self.physics = Physics(whole)
        self.residual = Residual()

    def fit(self, amounts: Floats, place: Floats, units: Floats, y: Floats) -> Self:
        """Learn seconds float64[n] from amounts of work, places and units of n rows."""
        self.physics.fit(amounts, units, y)
        self.scales_ = len(np.unique(units)) > 1
        self.rows_ = len(y)
        self.residual.fit(self._where(place, units), np.log(y / self.physics.predict(amounts, units)))
        return self

    def predict(self, amounts: Floats, place: Floats, units: Floats, deviate: bool) -> tuple[Floats, Floats]:
        """Log seconds and, where wanted, their standard deviation: float64[n] each."""
        mean, sigma = self.residual.predict(self._where(place, units), deviate)
        return np.log(self.physics.predict(amounts, units)) + mean, sigma

    def _where(self, place: Floats, units: Floats) -> Floats:
        return np.column_stack([place, np.log2(units)]) if self.scales_ else place
