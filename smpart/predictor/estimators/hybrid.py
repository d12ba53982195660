"""Hybrid steps: from what their two parts take alone, and, where enough were measured, from their own amounts too."""

from __future__ import annotations

from typing import Self

import numpy as np

from smpart.partition import ModelShape
from smpart.predictor.estimators.base import Floats, column
from smpart.predictor.estimators.phase import Phase, decode_place, prefill_place
from smpart.predictor.estimators.physics import decode_amounts, prefill_amounts
from smpart.predictor.estimators.residual import GUESS

_WIDE = 150
"""Hybrid steps from which on their own amounts and places count, besides what their parts take."""


class Hybrid:
    """Log seconds of hybrid steps.

    Without any measured one a step is taken to be as long as its parts one after the other, which is never too short.
    It is never taken to be shorter than the longer of its parts: few are measured with many sequences, and what is
    learnt from those with few would say so.

    Args:
        model: dimensions of the model that was measured.
        whole: units of the whole device.
    """

    def __init__(self, model: ModelShape, whole: float) -> None:
        self.model = model
        self.whole = whole
        self.narrow_: Phase | None = None
        self.wide_: Phase | None = None

    def fit(self, X: Floats, parts: Floats | None, y: Floats, trusted: bool) -> Self:  # noqa: N803
        """Learn from n steps.

        Args:
            parts: log seconds of both parts alone, float64[n, 2]; None: they are not known.
            trusted: whether those are known well enough to go by.
        """
        units = column(X, "units")
        if parts is not None:
            self.shared_ = float(np.exp(parts[:, 1].min()))
            self.narrow_ = Phase(self.whole).fit(self._sums(parts), parts / np.log(2.0), units, y)
        if parts is None or not trusted or len(X) > _WIDE:
            self.wide_ = Phase(self.whole).fit(*self._inputs(X, parts), units, y)
        return self

    def predict(self, X: Floats, parts: Floats | None, deviate: bool) -> tuple[Floats, Floats]:  # noqa: N803
        """Log seconds and, where wanted, their standard deviation: float64[n] each. Arguments as for `fit`."""
        if self.wide_ is not None:
            logs, sigma = self.wide_.predict(*self._inputs(X, parts), column(X, "units"), deviate)
            return logs if parts is None else np.maximum(logs, parts.max(axis=1)), sigma
        assert parts is not None
        return self.joined(parts, column(X, "units"))

    @property
    def noise(self) -> float:
        """Log standard deviation of single steps, which more of them would not take away."""
        made = self.wide_ or self.narrow_
        return 0.0 if made is None else made.residual.noise_

    def joined(self, parts: Floats, units: Floats) -> tuple[Floats, Floats]:
        """The same by nothing but the log seconds of both parts, float64[n, 2]."""
        if self.narrow_ is None:
            return np.logaddexp(parts[:, 0], parts[:, 1]), np.full(len(parts), GUESS)
        logs, sigma = self.narrow_.predict(self._sums(parts), parts / np.log(2.0), units, deviate=True)
        return np.maximum(logs, parts.max(axis=1)), sigma

    def _inputs(self, X: Floats, parts: Floats | None) -> tuple[Floats, Floats]:  # noqa: N803
        """Amounts and places. The longest sequence counts by itself: a kernel ends when its last block does."""
        places = prefill_place(X), decode_place(X)
        spans = np.exp2(np.column_stack([places[0][:, 1], places[1][:, 1]]))
        amounts = [prefill_amounts(X, self.model), decode_amounts(X, self.model), spans, spans.max(axis=1)[:, None]]
        if parts is None:
            return np.hstack(amounts), np.hstack(places)
        return np.hstack([*amounts, np.exp(parts)]), np.hstack([*places, parts / np.log(2.0)])

    def _sums(self, parts: Floats) -> Floats:
        """Amounts that a hybrid step's seconds are a sum of: a fixed part, those of both parts, and those of both less
        what they share, the weights, which the shortest decode step does nothing but read."""
        alone = np.exp(parts)
        once = np.maximum(alone.sum(axis=1) - self.shared_, alone.max(axis=1))
        return np.column_stack([np.ones(len(parts)), alone, once])
