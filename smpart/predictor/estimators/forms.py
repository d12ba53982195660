"""What the published forms share: which rows belong to what, and fits that make relative errors least."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares, nnls

from smpart.partition import ModelShape
from smpart.predictor.estimators.base import Floats, column

Mask = NDArray[np.bool_]

_EVALUATIONS = 60
"""Evaluations a start of `positive_fit` may take; these forms have settled long before."""

_LARGEST = 100.0
"""Largest logarithm of a constant: one that no row depends on may drift, but not out of a float's range."""

_ENOUGH = 1000
"""Rows that a handful of constants are fitted to, evenly taken from more."""


class Work(NamedTuple):
    """Arithmetic and traffic of one class of kernels in each row: float64[n] each."""

    flops: Floats
    bytes: Floats


def alone(X: Floats) -> Mask:  # noqa: N803 (scikit-learn's name)
    """Rows with nothing beside them."""
    others = column(X, "neighbour_units") + column(X, "contender_bytes_s") + column(X, "contender_flops_s")
    return np.equal(others, 0.0)


def solo_rows(X: Floats) -> Mask:  # noqa: N803
    """Rows to learn solo times from: those with nothing beside them, or all where there are none."""
    rows = alone(X)
    return rows if rows.any() else np.ones(len(X), dtype=np.bool_)


def thinned(rows: Mask) -> Mask:
    """At most so many of the rows, evenly taken, as a handful of constants need."""
    places = np.flatnonzero(rows)
    kept = np.zeros_like(rows)
    kept[places[:: max(1, -(-len(places) // _ENOUGH))]] = True
    return kept


def medians(X: Floats, y: Floats) -> tuple[Floats, Floats]:  # noqa: N803
    """Distinct rows, and the median seconds of each: equal rows are repeats of one measurement."""
    points, which = np.unique(X, axis=0, return_inverse=True)
    order = np.argsort(which.reshape(-1), kind="stable")
    ends = np.cumsum(np.bincount(which.reshape(-1)))[:-1]
    return points, np.array([np.median(part) for part in np.split(y[order], ends)])


def has_prefill(X: Floats) -> Mask:  # noqa: N803
    """Rows with a prefill part."""
    return column(X, "prefill_tokens") > 0.0


def has_decode(X: Floats) -> Mask:  # noqa: N803
    """Rows with a decode part."""
    return column(X, "decode_batch") > 0.0


def kernels(X: Floats, model: ModelShape) -> list[Work]:  # noqa: N803
    """The classes of kernels a forward is made of: linear layers, then attention, of prefill; the same of decode.

    Of a hybrid forward both phases count in full: the published forms know no forward that does both.
    """
    new, rows = column(X, "prefill_tokens"), column(X, "decode_batch")
    return [
        _linear(model, new, column(X, "prefill_chunks")),
        _attention(model, column(X, "prefill_pairs"), column(X, "prefill_context") + new),
        _linear(model, rows, rows),
        _attention(model, column(X, "decode_context"), column(X, "decode_context") + rows),
    ]


def _linear(model: ModelShape, tokens: Floats, sampled: Floats) -> Work:
    flops = 2.0 * (model.linear_params * tokens + model.head_params * sampled)
    return Work(flops, np.where(tokens > 0.0, float(model.weight_bytes), 0.0))


def _attention(model: ModelShape, pairs: Floats, moved: Floats) -> Work:
    return Work(4.0 * model.layers * model.heads * model.head_dim * pairs, float(model.kv_token_bytes) * moved)


def relative_nnls(terms: Floats, seconds: Floats) -> Floats:
    """Coefficients, none below 0, of a sum of `terms` float64[n, k] with the least squared relative error."""
    size = terms.max(axis=0, initial=0.0)
    used = size > 0.0
    coefficients = np.zeros(terms.shape[1])
    if used.any():
        found, _ = nnls(terms[:, used] / size[used] / seconds[:, None], np.ones(len(seconds)))
        coefficients[used] = found / size[used]
    return coefficients


def positive_fit(seconds_of: Callable[[Floats], Floats], starts: Sequence[Floats], seconds: Floats) -> Floats:
    """Positive constants of a form, from the best of some starts: least squares of log ratios to measured seconds."""

    def constants(logs: Floats) -> Floats:
        return np.asarray(np.exp(np.clip(logs, -_LARGEST, _LARGEST)))

    def off(logs: Floats) -> Floats:
        return np.asarray(np.log(np.maximum(seconds_of(constants(logs)), 1e-12) / seconds))

    fits = [least_squares(off, np.log(start), loss="soft_l1", f_scale=0.1, max_nfev=_EVALUATIONS) for start in starts]
    return constants(min(fits, key=lambda fit: float(fit.cost)).x)
