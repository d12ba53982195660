"""How far predictions are off: the measures that every estimator is put through alike."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


class Errors(NamedTuple):
    """Absolute percentage errors (0.05 is 5 %) over so many `cases`."""

    median_ape: float
    p95_ape: float
    max_ape: float
    cases: int


class Bound(NamedTuple):
    """How good an upper bound is.

    Attributes:
        coverage: share of actual times at or under it.
        mean_excess: mean of bound over actual time, less 1.
    """

    coverage: float
    mean_excess: float


def errors(actual: Floats, predicted: Floats) -> Errors:
    """Errors of predictions against actual times.

    >>> errors(np.array([1.0, 2.0, 4.0]), np.array([1.1, 2.0, 3.0]))
    Errors(median_ape=0.1, p95_ape=0.235, max_ape=0.25, cases=3)
    """
    return summed_up(np.abs(predicted / actual - 1.0))


def summed_up(off: Floats) -> Errors:
    """Errors out of absolute percentage errors; not-a-numbers where there are none.

    >>> summed_up(np.array([0.1, 0.3]))
    Errors(median_ape=0.2, p95_ape=0.29, max_ape=0.3, cases=2)
    """
    if not len(off):
        return Errors(float("nan"), float("nan"), float("nan"), 0)
    median, p95, worst = (round(float(x), 6) for x in (np.median(off), np.percentile(off, 95), off.max()))
    return Errors(median, p95, worst, len(off))


def bound(actual: Floats, upper: Floats, weights: Floats | None = None) -> Bound:
    """How an upper bound covers actual times, which may count by `weights`.

    >>> bound(np.array([1.0, 2.0]), np.array([1.5, 2.0]))
    Bound(coverage=1.0, mean_excess=0.25)
    """
    covered, excess = np.average(actual <= upper, weights=weights), np.average(upper / actual - 1.0, weights=weights)
    return Bound(round(float(covered), 6), round(float(excess), 6))


def quantile(values: Floats, weights: Floats, share: float, beyond: float = 0.0) -> float:
    """The least value that so much of the weight is at or under; the largest if that is more than there is.

    Args:
        beyond: weight to count as larger than all values: conformal prediction adds that of the one to come.

    >>> quantile(np.array([3.0, 1.0, 2.0]), np.ones(3), 0.6), quantile(np.array([3.0, 1.0, 2.0]), np.ones(3), 0.6, 1.0)
    (2.0, 3.0)
    """
    order = np.argsort(values)
    below = np.cumsum(weights[order])
    enough = np.searchsorted(below, (below[-1] + beyond) * share - 1e-9)
    return float(values[order[min(int(enough), len(order) - 1)]])


def groups(X: Floats, columns: slice) -> NDArray[np.intp]:  # noqa: N803 (scikit-learn's name)
    """Which rows are of one kind: equal in `columns` (shapes, or load mixes), whatever the rest."""
    return np.unique(X[:, columns], axis=0, return_inverse=True)[1].reshape(-1)
