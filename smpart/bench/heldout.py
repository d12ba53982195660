"""Judges estimators on what they were not fitted to: a profile's points, held out by shape, by load mix, by units.

Every estimator is put through the same folds. A point that was measured several times (an anchor) counts once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Self, TypeGuard

import numpy as np
from numpy.typing import NDArray
from sklearn.base import clone
from sklearn.model_selection import GroupKFold
from sklearn.utils.parallel import Parallel, delayed
from sklearn.utils.validation import has_fit_parameter

from smpart.predictor.accuracy import Bound, Errors, bound, errors
from smpart.predictor.estimators.base import LatencyEstimator
from smpart.predictor.estimators.contention import Contention
from smpart.profiler.pace import paces
from smpart.profiler.sample import Point, Sample, matrix

Floats = NDArray[np.float64]
Rows = NDArray[np.intp]

FOLDS = 5
TESTS = {"solo": "shape", "corun": "load mix", "scaling": "number of units"}
"""The held-out tests, and what each leaves out together."""
_FEWEST_COUNTS = 3
"""Numbers of units that the scaling test needs: with two, one would be predicted from the other."""


@dataclass(frozen=True)
class Measured:
    """The distinct points of a profile, in the order in which they were first measured.

    Attributes:
        points: n different ones.
        repeats: seconds of every undisturbed repeat of each.
        paces: how slow the machine was at each of them, 1 being usual.
    """

    points: Sequence[Point]
    repeats: Sequence[tuple[float, ...]]
    paces: Sequence[tuple[float, ...]]

    @classmethod
    def of(cls, samples: Sequence[Sample], pace: Sequence[float] | None = None) -> Self:
        """Samples of one point are put together.

        Args:
            pace: the machine's at each sample; None: as their own anchors tell it.
        """
        pooled: dict[Point, tuple[float, ...]] = {}
        slow: dict[Point, tuple[float, ...]] = {}
        for sample, own in zip(samples, paces(samples).tolist() if pace is None else pace, strict=True):
            pooled[sample.point] = pooled.get(sample.point, ()) + sample.seconds
            slow[sample.point] = slow.get(sample.point, ()) + (own,) * len(sample.seconds)
        return cls(list(pooled), list(pooled.values()), list(slow.values()))

    @cached_property
    def matrix(self) -> Floats:
        """What estimators take: float64[n, columns]."""
        return matrix(self.points)

    @cached_property
    def matrix_alone(self) -> Floats:
        """The same forwards on the same units with nothing beside them: float64[n, columns]."""
        return matrix(Point(p.shape, p.units) for p in self.points)

    @cached_property
    def seconds(self) -> Floats:
        """Median seconds of each point, at the machine's usual pace: float64[n]."""
        pairs = zip(self.repeats, self.paces, strict=True)
        return np.array([np.median(np.divide(repeats, slow)) for repeats, slow in pairs])

    @cached_property
    def repeat_rows(self) -> Rows:
        """The point of every single repeat: int[repeats in all]."""
        return np.repeat(np.arange(len(self.points)), [len(r) for r in self.repeats])

    @cached_property
    def repeat_seconds(self) -> Floats:
        """Seconds of every single repeat, as `repeat_rows` tells whose: float64[repeats in all]."""
        return np.array([s for repeat in self.repeats for s in repeat])

    @cached_property
    def repeat_paces(self) -> Floats:
        """How slow the machine was at every single repeat: float64[repeats in all]."""
        return np.array([pace for slow in self.paces for pace in slow])

    @cached_property
    def alone(self) -> NDArray[np.bool_]:
        """Which points have no neighbour: bool[n]."""
        return np.array([p.alone for p in self.points], dtype=bool)

    def folds(self, test: str) -> Iterator[tuple[Rows, Rows]]:
        """Rows to fit and rows to predict, fold by fold; together the latter are all that `test` is about.

        * ``solo``: points alone, by shape. No fold is fitted with any point of a shape that it predicts, on
          whatever units and beside whatever neighbour.
        * ``corun``: points with a neighbour, by load mix: the two shapes (or the shape and the contender) that run
          together, whichever of them is timed and on whatever units. All other points are fitted, those alone too.
        * ``scaling``: points alone, by number of units, with all other numbers fitted.

        Raises:
            ValueError: the profile has too little for this test; the message says what.
        """
        kinds, tested = self._kinds(test)
        where = np.flatnonzero(tested)
        present = len(np.unique(kinds[where]))
        needed = _FEWEST_COUNTS if test == "scaling" else 2
        if present < needed:
            beside = "beside a neighbour" if test == "corun" else "alone"
            raise ValueError(
                f"measured {beside}: {present} of the {needed} different {_PLURALS[test]} that a held-out test needs"
            )
        for _, held in GroupKFold(min(FOLDS, present)).split(where, groups=kinds[where]):
            test_rows = where[held]
            yield np.flatnonzero(~np.isin(kinds, kinds[test_rows])), test_rows

    def _kinds(self, test: str) -> tuple[Rows, NDArray[np.bool_]]:
        """What each point is a case of (equal numbers are left out together), and which points are predicted."""
        if test == "solo":
            return _numbers([p.shape for p in self.points]), self.alone
        if test == "scaling":
            return _numbers([p.units for p in self.points]), self.alone
        mixes = [None if p.alone else frozenset((p.shape, p.contender.kind or p.neighbour)) for p in self.points]
        return _numbers(mixes), ~self.alone


_PLURALS = {"solo": "shapes", "corun": "load mixes", "scaling": "numbers of units"}


def _numbers(keys: Sequence[object]) -> Rows:
    seen: dict[object, int] = {}
    return np.array([seen.setdefault(key, len(seen)) for key in keys], dtype=np.intp)


class Held(NamedTuple):
    """Held-out predictions: seconds, float64[n], NaN for points that the test is not about.

    Attributes:
        predicted: expected seconds.
        upper: the bound; NaN everywhere if the estimator has none.
        alone: expected seconds of the same forwards without their neighbours, by the same fits.
        fold: which fold predicted each, from 0; -1 for points that the test is not about.
    """

    predicted: Floats
    upper: Floats
    alone: Floats
    fold: Rows


Trials = Mapping[str, Held | str]
"""By test: an estimator's held-out predictions, or why there are none."""


def trials(
    estimator: LatencyEstimator, measured: Measured, tests: Sequence[str] = tuple(TESTS), processes: int = 1
) -> Trials:
    """Put an estimator through the held-out tests. What cannot be fitted or tested comes back as the reason."""
    done: dict[str, Held | str] = {}
    for test in tests:
        try:
            done[test] = held_out(estimator, measured, test, processes)
        except ValueError as error:
            done[test] = " ".join(str(error).split())
    return done


def held_out(estimator: LatencyEstimator, measured: Measured, test: str, processes: int = 1) -> Held:
    """Predictions of one test, each by a clone that was fitted without its kind.

    Raises:
        ValueError: too little was measured for this test, or the estimator cannot be fitted to what is left.
    """
    count = len(measured.points)
    predicted, fold_of = np.full((3, count), np.nan), np.full(count, -1, dtype=np.intp)
    folds = list(measured.folds(test))
    results = Parallel(n_jobs=processes)(delayed(_fold)(clone(estimator), measured, *fold) for fold in folds)
    for number, ((_, rows), columns) in enumerate(zip(folds, results, strict=True)):
        predicted[:, rows] = columns
        fold_of[rows] = number
    return Held(predicted[0], predicted[1], predicted[2], fold_of)


def fit(estimator: LatencyEstimator, measured: Measured, rows: Rows) -> LatencyEstimator:
    """Fit an estimator to some points, and return it.

    One that gives bounds learns from every single repeat, since it is single runs that they are to hold; one that
    does not learns from medians. Raises `ValueError` if it cannot be fitted to them.
    """
    if hasattr(estimator, "predict_upper"):
        repeats = np.flatnonzero(np.isin(measured.repeat_rows, rows))
        X, slow = measured.matrix[measured.repeat_rows[repeats]], measured.repeat_paces[repeats]  # noqa: N806
        seconds = measured.repeat_seconds[repeats]
        return estimator.fit(X, seconds, pace=slow) if _paced(estimator) else estimator.fit(X, seconds / slow)
    return estimator.fit(measured.matrix[rows], measured.seconds[rows])


def _paced(estimator: LatencyEstimator) -> TypeGuard[Contention]:
    """Whether it tells the machine's pace from the time of a forward by itself."""
    return bool(has_fit_parameter(estimator, "pace"))


def _fold(estimator: LatencyEstimator, measured: Measured, train: Rows, test: Rows) -> Floats:
    """Expected seconds, bound, and expected seconds alone, of the rows `test`: float64[3, n]."""
    fit(estimator, measured, train)
    rows = measured.matrix[test]
    predict_upper = getattr(estimator, "predict_upper", None)
    upper = np.full(len(test), np.nan) if predict_upper is None else predict_upper(rows)
    return np.stack([estimator.predict(rows), upper, estimator.predict(measured.matrix_alone[test])])


def accuracy(measured: Measured, held: Held) -> Errors:
    """Errors against the median of each point."""
    rows = np.flatnonzero(held.fold >= 0)
    return errors(measured.seconds[rows], held.predicted[rows])


def bound_of(measured: Measured, helds: Sequence[Held]) -> Bound | None:
    """How the upper bounds held against every single repeat, points counting alike; None where there are no bounds."""
    found = [repeat_bounds(measured, held) for held in helds]
    actual, upper, weights = (np.concatenate(arrays) for arrays in zip(*found, strict=True)) if found else _NOTHING
    return bound(actual, upper, weights) if len(actual) and not np.isnan(upper).any() else None


_NOTHING = (np.empty(0),) * 3


def repeat_bounds(measured: Measured, held: Held) -> tuple[Floats, Floats, Floats]:
    """Seconds of every repeat that the test is about, the bound that was to hold it, and its share of its point.

    An anchor has a hundred times as many repeats as other points; by their shares all points count alike.
    """
    row = measured.repeat_rows[held.fold[measured.repeat_rows] >= 0]
    shares = 1.0 / np.bincount(measured.repeat_rows)
    return measured.repeat_seconds[held.fold[measured.repeat_rows] >= 0], held.upper[row], shares[row]
