"""Our estimator: seconds = alone(shape, whole device) x scaling(shape, units) x slowdown(shape, neighbour)."""

from __future__ import annotations

from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray
from sklearn.model_selection import GroupKFold
from sklearn.utils.validation import check_is_fitted

from smpart.partition import ModelShape
from smpart.predictor.accuracy import groups, quantile
from smpart.predictor.estimators.alone import Alone
from smpart.predictor.estimators.base import MIX, NEIGHBOUR, SHAPE, UNITS, Floats, LatencyEstimator, column
from smpart.predictor.estimators.phase import phases
from smpart.predictor.estimators.residual import GUESS
from smpart.predictor.estimators.slowdown import Slowdown, moved_bytes

Flags = NDArray[np.bool_]
_Key = tuple[int, bool]
_FOLDS, _MANY = 5, 400
"""Fits with a part left out that bounds are set by; two do where there are many rows, for half of them are enough."""


class _Widths(NamedTuple):
    """How wide bounds are, by phase and company: in standard deviations, and in log seconds, the same everywhere."""

    scaled: dict[_Key, float]
    plain: dict[_Key, float]


class Contention(LatencyEstimator):
    """Seconds of a forward on some units beside a neighbour, with an upper bound that covers single runs.

    Rows may repeat: equal rows are repeats of one measurement. Their median is learnt; the bound is set so that it
    covers `coverage` of the repeats of points that were left out: conformal prediction by cross-fitting with locally
    scaled scores (Barber et al., Predictive inference with the jackknife+, Annals of Statistics 2021; Lei et al.,
    Distribution-free predictive inference for regression, JASA 2018, section 5.2). It is set when first asked for.

    Args:
        model: dimensions of the model that was measured.
        units: units of the whole device.
        coverage: share of single runs that the upper bound is to cover.
    """

    def __init__(self, model: ModelShape, units: int, coverage: float = 0.99) -> None:
        super().__init__(model, units)
        self.coverage = coverage

    def fit(self, X: Any, y: Any, pace: Any = None) -> Self:  # noqa: N803
        """Learn from float64[n, len(COLUMNS)] and seconds float64[n]. Raises `ValueError` for anything else.

        Args:
            pace: how slow the machine was at each row, 1 being usual: float64[n]. Expected times are then those at the
                usual pace; the bound still is one of the seconds as they were. None: always the usual one.
        """
        self._pace = 1.0 if pace is None else np.asarray(pace, dtype=np.float64)
        return super().fit(X, y)

    def _fit(self, X: Floats, y: Floats) -> None:  # noqa: N803
        self.points_, which = np.unique(X, axis=0, return_inverse=True)
        which = which.reshape(-1)
        self.repeats_, usual = (which, y), y / self.__dict__.pop("_pace")
        self.medians_ = np.array([np.median(usual[which == place]) for place in range(len(self.points_))])
        beside = has_neighbour(self.points_)
        if beside.all():
            raise ValueError("no forward was measured alone: there is nothing to compare those beside a neighbour with")
        self.alone_ = Alone(self.model, self.units).fit(self.points_[~beside], self.medians_[~beside])
        self.slowdowns_ = {
            phase: self._slowdown(np.flatnonzero(beside & (phases(self.points_) == phase)))
            for phase in np.unique(phases(self.points_[beside])).tolist()
        }
        self.widths_: _Widths | None = None

    def _slowdown(self, rows: NDArray[np.intp]) -> Slowdown:
        """Fitted to some of the points beside neighbours."""
        part = self.points_[rows]
        ratio = self.medians_[rows] / np.exp(self.alone_.predict(without_neighbour(part))[0])
        return Slowdown().fit(*self._asked(part), column(part, "units"), ratio)

    def _predict(self, X: Floats) -> Floats:  # noqa: N803
        return np.exp(self._logs(X)[0])

    def predict_upper(self, X: Any) -> Floats:  # noqa: N803
        """Seconds that single runs stay under: float64[n]."""
        X = self._checked(X)  # noqa: N806
        logs, sigma = self._logs(X)
        width = np.array([self.width(*key) for key in _keys(X)])
        upper: Floats = np.exp(logs + width * sigma)
        return upper

    def width(self, phase: int, beside: bool) -> float:
        """Standard deviations from the expected log seconds to their upper bound."""
        return self._width(self._bounds().scaled, (phase, beside))

    def plain_width(self, phase: int, beside: bool) -> float:
        """Log of the upper bound over the expected seconds, the same for all forwards of a kind."""
        return self._width(self._bounds().plain, (phase, beside))

    def doubt(self, X: Any) -> Floats:  # noqa: N803
        """Log standard deviation of the prediction, less noise that no measuring would take away: float64[n]."""
        X = without_neighbour(points := self._checked(X))  # noqa: N806
        variance = self.alone_.unsure(X) ** 2 - self.alone_.noise(X) ** 2
        phase, beside = phases(points), has_neighbour(points)
        for one in np.unique(phase[beside]).tolist():
            rows = beside & (phase == one)
            if one in self.slowdowns_:
                made, part = self.slowdowns_[one], points[rows]
                unsure = made.predict(*self._asked(part), column(part, "units"))[1]
                variance[rows] += unsure**2 - made.residual_.noise_**2
            else:
                variance[rows] += GUESS**2
        return np.sqrt(np.maximum(variance, 0.0))

    def scaling(self, X: Any) -> Floats:  # noqa: N803
        """Seconds alone on the row's units over seconds alone on the whole device, at least 1: float64[n]."""
        X = without_neighbour(self._checked(X))  # noqa: N806
        whole = X.copy()
        whole[:, UNITS] = self.units
        scaling: Floats = np.exp(self.alone_.predict(X)[0] - self.alone_.predict(whole)[0])
        return scaling

    def slowdown(self, X: Any) -> Floats:  # noqa: N803
        """Seconds beside the row's neighbour over seconds alone on the same units, at least 1: float64[n]."""
        X = self._checked(X)  # noqa: N806
        slower: Floats = np.exp(self._logs(X)[0] - self.alone_.predict(without_neighbour(X))[0])
        return slower

    def _checked(self, X: Any) -> Floats:  # noqa: N803
        check_is_fitted(self)
        checked: Floats = np.asarray(X, dtype=np.float64)
        self._check(checked)
        return checked

    def _logs(self, X: Floats) -> tuple[Floats, Floats]:  # noqa: N803
        logs, sigma = self.alone_.predict(without_neighbour(X))
        beside, phase = has_neighbour(X), phases(X)
        for one in np.unique(phase[beside]).tolist():
            rows = beside & (phase == one)
            if one in self.slowdowns_:
                part = X[rows]
                slower, sigma[rows] = self.slowdowns_[one].predict(*self._asked(part), column(part, "units"))
                logs[rows] += slower
        return logs, sigma

    def _asked(self, X: Floats) -> tuple[Floats, Floats]:  # noqa: N803
        """Bytes a second that each row's forward, and its neighbour, would move alone."""
        own = moved_bytes(X, self.model) / np.exp(self.alone_.predict(without_neighbour(X))[0])
        other = neighbours(X)
        beside = column(X, "contender_bytes_s").copy()
        real = phases(other) > 0
        if real.any():
            beside[real] = moved_bytes(other[real], self.model) / np.exp(self.alone_.predict(other[real])[0])
        return own, beside

    def _bounds(self) -> _Widths:
        if self.widths_ is None:
            logs, sigma = self._left_out()
            which, y = self.repeats_
            missed, weights = np.log(y) - logs[which], 1.0 / np.bincount(which)[which]
            keys = _keys(self.points_[which])
            scaled = _quantiles(keys, missed / sigma[which], weights, self.coverage)
            self.widths_ = _Widths(scaled, _quantiles(keys, missed, weights, self.coverage))
        return self.widths_

    def _left_out(self) -> tuple[Floats, Floats]:
        """Log seconds of every point, and how unsure, by fits without its shape (alone) or its load mix (beside)."""
        logs, sigma = self._logs(self.points_)
        sigma = np.maximum(sigma, 1e-6)
        beside = has_neighbour(self.points_)
        for train, test in _folds(self.points_, np.flatnonzero(~beside), SHAPE):
            try:
                fitted = Alone(self.model, self.units).fit(self.points_[train], self.medians_[train])
                logs[test], sigma[test] = fitted.predict(self.points_[test])
            except ValueError:  # the only ones of their phase were left out
                sigma[test] = GUESS
        for phase in self.slowdowns_:
            rows = np.flatnonzero(beside & (phases(self.points_) == phase))
            for train, test in _folds(self.points_, rows, MIX):
                part = self.points_[test]
                slower, unsure = self._slowdown(train).predict(*self._asked(part), column(part, "units"))
                logs[test] = self.alone_.predict(without_neighbour(part))[0] + slower
                sigma[test] = unsure
        return logs, sigma

    @staticmethod
    def _width(widths: dict[_Key, float], key: _Key) -> float:
        """That of a kind; of one never measured, the widest there is."""
        return widths.get(key, max(widths.values()))


def has_neighbour(X: Floats) -> Flags:  # noqa: N803
    """Which rows have one: bool[n]."""
    beside: Flags = column(X, "neighbour_units") > 0
    return beside


def without_neighbour(X: Floats) -> Floats:  # noqa: N803
    """The same forwards on the same units, alone."""
    alone = X.copy()
    alone[:, UNITS + 1 :] = 0.0
    return alone


def neighbours(X: Floats) -> Floats:  # noqa: N803
    """The neighbours as forwards of their own, alone on their units."""
    other = np.zeros_like(X)
    other[:, SHAPE] = X[:, NEIGHBOUR]
    other[:, UNITS] = np.maximum(1.0, column(X, "neighbour_units"))
    return other


def _keys(X: Floats) -> list[_Key]:  # noqa: N803
    return [(int(phase), bool(beside)) for phase, beside in zip(phases(X), has_neighbour(X), strict=True)]


def _quantiles(keys: list[_Key], scores: Floats, weights: Floats, coverage: float) -> dict[_Key, float]:
    """What `coverage` of the scores stay under, by kind of forward; at least 0. Points count alike, not repeats."""
    widths: dict[_Key, float] = {}
    for key in set(keys):
        rows = np.flatnonzero([other == key for other in keys])
        widths[key] = max(0.0, quantile(scores[rows], weights[rows], coverage, beyond=1.0))
    return widths


def _folds(points: Floats, rows: NDArray[np.intp], kind: slice) -> list[tuple[NDArray[np.intp], NDArray[np.intp]]]:
    """Rows to fit and rows to predict, fold by fold; rows that are equal in the columns `kind` are left out together.

    None where all rows are of one kind.
    """
    kinds = groups(points[rows], kind) if len(rows) else np.zeros(0, dtype=np.intp)
    count = min(_FOLDS if len(rows) < _MANY else 2, len(np.unique(kinds)))
    if count < 2:
        return []
    return [(rows[train], rows[test]) for train, test in GroupKFold(count).split(rows, groups=kinds)]
