"""semi-PD's inverse law of the share of SMs (arXiv 2504.19867, section 4.3)."""

from __future__ import annotations

import numpy as np

from smpart.predictor.estimators.base import Floats, LatencyEstimator, column
from smpart.predictor.estimators.forms import alone, has_decode, has_prefill, kernels, relative_nnls


class SemiPD(LatencyEstimator):
    """``a / y + b`` of a phase's share ``y`` of the units.

    The law knows no shapes: its authors refit it every window to whatever was served. Completed here, generously:
    ``work * (a / y + b) + c`` for each phase, summed over its kinds of work, each with ``a`` and ``b`` of its own: a
    prefill's arithmetic, a decode step's bytes and its sequences. A hybrid forward is the sum of both phases. What
    ran beside a neighbour has constants of its own, as a window's refit would.

    Attributes:
        alone_, beside_: ``a, b`` of each kind of work, then ``c`` of each phase; `beside_` equals `alone_` where
            nothing was measured beside a neighbour.
    """

    def _fit(self, X: Floats, y: Floats) -> None:  # noqa: N803
        rows, terms = alone(X), self._terms(X)
        # Only one of both may have been measured.
        self.alone_ = relative_nnls(terms[rows], y[rows]) if rows.any() else relative_nnls(terms, y)
        self.beside_ = self.alone_ if rows.all() else relative_nnls(terms[~rows], y[~rows])
        self.least_ = float(y.min())

    def _predict(self, X: Floats) -> Floats:  # noqa: N803
        terms = self._terms(X)
        seconds = np.where(alone(X), terms @ self.alone_, terms @ self.beside_)
        return np.maximum(seconds, self.least_)

    def _terms(self, X: Floats) -> Floats:  # noqa: N803
        inverse = self.units / np.maximum(column(X, "units"), 1.0)
        prefill_linear, prefill_attention, decode_linear, decode_attention = kernels(X, self.model)
        work = [
            prefill_linear.flops + prefill_attention.flops,
            decode_linear.bytes + decode_attention.bytes,
            column(X, "decode_batch"),
        ]
        laws = [term for amount in work for term in (amount * inverse, amount)]
        return np.column_stack([*laws, has_prefill(X), has_decode(X)])
