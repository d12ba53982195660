"""How many times slower a forward gets beside a neighbour, from what both ask of the memory."""

from __future__ import annotations

from typing import Self

import numpy as np
from sklearn.linear_model import LinearRegression

from smpart.partition import ModelShape
from smpart.predictor.estimators.base import Floats, column
from smpart.predictor.estimators.residual import Residual


def moved_bytes(X: Floats, model: ModelShape) -> Floats:  # noqa: N803
    """Bytes that each row's forward must at least move, as `ModelShape.bytes` has them: float64[n]."""
    read = column(X, "prefill_context") + column(X, "decode_context")
    tokens = column(X, "prefill_tokens") + column(X, "decode_batch")
    return model.weight_bytes + model.kv_token_bytes * (read + tokens)


class Slowdown:
    """One phase's slowdown: a non-negative sum that rises with what both sides ask for, then a residual in log space.

    What a side asks for is the bytes a second that it would move alone on its units.
    """

    def fit(self, own: Floats, beside: Floats, units: Floats, ratio: Floats) -> Self:
        """Learn from n forwards.

        Args:
            own, beside: what the forwards and their neighbours ask for.
            units: of the forwards.
            ratio: seconds beside the neighbour over seconds alone.
        """
        self.asked_ = np.log2(np.column_stack([own, beside]) + 1.0)
        self.scale_ = max(float(own.max()), 1.0), max(float(beside.max()), 1.0)
        terms = self._terms(own, beside)
        fitted = LinearRegression(positive=True, fit_intercept=False).fit(terms, np.maximum(ratio - 1.0, 0.0))
        self.coef_ = fitted.coef_
        self.scales_ = len(np.unique(units)) > 1
        self.residual_ = Residual().fit(self._where(own, beside, units), np.log(ratio / self._sum(own, beside)))
        return self

    def predict(self, own: Floats, beside: Floats, units: Floats) -> tuple[Floats, Floats]:
        """Log slowdown, at least 0, and its standard deviation: float64[n] each. Arguments as for `fit`."""
        mean, sigma = self.residual_.predict(self._where(own, beside, units))
        return np.maximum(0.0, np.log(self._sum(own, beside)) + mean), sigma

    def at(self, asked: Floats, units: float) -> tuple[Floats, Floats]:
        """The same, by log2 of what both ask for: float64[n, 2]."""
        own, beside = np.exp2(asked.T) - 1.0
        return self.predict(own, beside, np.full(len(asked), float(units)))

    def _sum(self, own: Floats, beside: Floats) -> Floats:
        total: Floats = 1.0 + self._terms(own, beside) @ self.coef_
        return total

    def _terms(self, own: Floats, beside: Floats) -> Floats:
        mine, theirs = own / self.scale_[0], beside / self.scale_[1]
        return np.column_stack([np.ones(len(own)), theirs, mine * theirs])

    def _where(self, own: Floats, beside: Floats, units: Floats) -> Floats:
        place = [np.log2(1.0 + own), np.log2(1.0 + beside)]
        return np.column_stack([*place, np.log2(units)] if self.scales_ else place)
