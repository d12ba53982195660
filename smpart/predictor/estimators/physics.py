"""What physics says of a forward: amounts of work that add up, each shrinking with the units in ways of its own.

Seconds are a sum over (amount of work) x (how that amount scales), every coefficient at least 0. All scalings fall
with the units, so any such sum does too: no data can teach it that a forward gets slower on more units. Which
amounts count, and how each scales, is found by non-negative least squares of relative errors.
"""

from __future__ import annotations

from typing import Self

import numpy as np
from sklearn.linear_model import LinearRegression

from smpart.partition import ModelShape
from smpart.predictor.estimators.base import Floats, column

_TOKEN_BENDS = (32.0, 128.0, 512.0)
"""Prompt tokens beyond which another rate may begin: below some size a matmul is bound by its weights' traffic."""
_ROW_BENDS = (8.0, 32.0, 64.0)
"""Decoding sequences, likewise."""
_POWERS = (1.0, 0.5, 1.5)
"""Exponents of (whole device / units); the first one stands alone where all was measured on equally many units."""
_KNEES = (0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8)
"""Shares of the device below which something scales and above which it does not (bandwidth saturates)."""
_RIDGE = 1e-4
"""Keeps coefficients that the data say nothing of from growing; in relative error squared."""


def prefill_amounts(X: Floats, model: ModelShape) -> Floats:  # noqa: N803
    """Amounts of prefill work: float64[n, k]; columns without any are 0.

    A fixed part, arithmetic of the linear layers (and where its rate changes), of the head, of attention, keys and
    values read and written, and the number of packed prompts.
    """
    tokens, context = column(X, "prefill_tokens"), column(X, "prefill_context")
    pairs, chunks = column(X, "prefill_pairs"), column(X, "prefill_chunks")
    return np.column_stack(
        [
            np.ones(len(X)),
            tokens,
            np.sqrt(tokens),
            *(np.maximum(0.0, tokens - bend) for bend in _TOKEN_BENDS),
            pairs * (model.heads * model.head_dim),
            (context + tokens) * model.kv_token_bytes,
            chunks,
        ]
    )


def decode_amounts(X: Floats, model: ModelShape) -> Floats:  # noqa: N803
    """Amounts of work of a decode step: float64[n, k]: a fixed part, sequences, and the keys and values they read."""
    rows, context = column(X, "decode_batch"), column(X, "decode_context")
    return np.column_stack(
        [
            np.ones(len(X)),
            rows,
            np.sqrt(rows),
            *(np.maximum(0.0, rows - bend) for bend in _ROW_BENDS),
            context * model.kv_token_bytes,
        ]
    )


def unit_terms(units: Floats, whole: float) -> Floats:
    """Ways to scale over units, each 1 on the whole device and falling towards it: float64[n, k]."""
    inverse = whole / units
    powers = [inverse**power for power in _POWERS]
    knees = [np.maximum(1.0, knee * inverse) for knee in _KNEES]
    return np.column_stack([powers[0], np.ones(len(units)), *powers[1:], *knees])


def _terms(counts: int) -> int:
    """How many ways to scale so many different numbers of units can tell apart."""
    if counts <= 2:
        return counts
    return 2 + len(_POWERS) - 1 + (len(_KNEES) if counts > 3 else 0)


class Physics:
    """A non-negative sum of amounts x scalings.

    Args:
        whole: units of the whole device.
    """

    def __init__(self, whole: float) -> None:
        self.whole = whole

    def fit(self, amounts: Floats, units: Floats, seconds: Floats) -> Self:
        """Learn the coefficients, all at least 0, that make relative errors least."""
        self.terms_ = _terms(len(np.unique(units)))
        table = self._table(amounts, units)
        self.scale_ = table.max(axis=0)
        self.used_ = self.scale_ > 0.0
        relative = table[:, self.used_] / self.scale_[self.used_] / seconds[:, None]
        ridge = np.sqrt(_RIDGE / relative.shape[1]) * np.eye(relative.shape[1]) * np.abs(relative).max(axis=0)
        left = np.vstack([relative, ridge])
        right = np.concatenate([np.ones(len(seconds)), np.zeros(len(ridge))])
        fitted = LinearRegression(positive=True, fit_intercept=False).fit(left, right)
        self.coef_ = np.zeros(table.shape[1])
        self.coef_[self.used_] = fitted.coef_ / self.scale_[self.used_]
        return self

    def predict(self, amounts: Floats, units: Floats) -> Floats:
        """Seconds: float64[n]."""
        seconds: Floats = self._table(amounts, units) @ self.coef_
        return seconds

    def _table(self, amounts: Floats, units: Floats) -> Floats:
        product = amounts[:, :, None] * unit_terms(units, self.whole)[:, None, : self.terms_]
        return product.reshape(len(amounts), -1)
