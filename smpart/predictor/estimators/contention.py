"""Our estimator: seconds = alone(shape, whole device) x scaling(shape, units) x slowdown(shape, neighbour)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.linear_model import LinearRegression
from sklearn.utils.validation import check_is_fitted

from smpart.partition import ModelShape
from smpart.predictor.accuracy import groups
from smpart.predictor.estimators.alone import Alone, phases
from smpart.predictor.estimators.base import MIX, NEIGHBOUR, SHAPE, UNITS, Floats, LatencyEstimator, column
from smpart.predictor.estimators.residual import Residual

_Key = tuple[int, bool]


def moved_bytes(X: Floats, model: ModelShape) -> Floats:  # noqa: N803
    """Bytes that each row's forward must at least move, as `ModelShape.bytes` has them: float64[n]."""
    read = column(X, "prefill_context") + column(X, "decode_context")
    tokens = column(X, "prefill_tokens") + column(X, "decode_batch")
    return model.weight_bytes + model.kv_token_bytes * (read + tokens)


class _Slowdown:
    """How many times slower one phase is beside a neighbour: a sum of what both ask of the memory, then a residual.

    The sum is non-negative and rises with what the neighbour asks for. Coordinates of the residual: bytes a second
    that the forward and its neighbour would move alone, and the forward's units.
    """

    def fit(self, own: Floats, beside: Floats, units: Floats, ratio: Floats, kinds: NDArray[np.intp]) -> _Slowdown:
        self.asked_ = np.log2(np.column_stack([own, beside]) + 1.0)
        self.scale_ = max(float(own.max()), 1.0), max(float(beside.max()), 1.0)
        terms = self._terms(own, beside)
        fitted = LinearRegression(positive=True, fit_intercept=False).fit(terms, np.maximum(ratio - 1.0, 0.0))
        self.coef_ = fitted.coef_
        self.scales_ = len(np.unique(units)) > 1
        self.residual_ = Residual().fit(self._where(own, beside, units), np.log(ratio / self._sum(own, beside)), kinds)
        return self

    def predict(self, own: Floats, beside: Floats, units: Floats) -> tuple[Floats, Floats]:
        """Log slowdown, at least 0, and its standard deviation: float64[n] each."""
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


class Contention(LatencyEstimator):
    """Seconds of a forward on some units beside a neighbour, with an upper bound that covers single runs.

    Rows may repeat: equal rows are repeats of one measurement. Their median is learnt; the bound is set so that it
    covers `coverage` of the repeats of points that were left out (split conformal prediction with locally scaled
    scores: Lei et al., Distribution-Free Predictive Inference for Regression, JASA 2018, section 5.2).

    Args:
        model: dimensions of the model that was measured.
        units: units of the whole device.
        coverage: share of single runs that the upper bound is to cover.
    """

    def __init__(self, model: ModelShape, units: int, coverage: float = 0.99) -> None:
        super().__init__(model, units)
        self.coverage = coverage

    def _fit(self, X: Floats, y: Floats) -> None:  # noqa: N803
        points, which = np.unique(X, axis=0, return_inverse=True)
        which = which.reshape(-1)
        self.points_ = points
        medians = np.array([np.median(y[which == place]) for place in range(len(points))])
        beside = _beside(points)
        if beside.all():
            raise ValueError("no forward was measured alone: there is nothing to compare those beside a neighbour with")
        self.alone_ = Alone(self.model, self.units).fit(points[~beside], medians[~beside])
        expected, unsure = np.log(medians), np.ones(len(points))
        expected[~beside] -= self.alone_.left_out_
        unsure[~beside] = self.alone_.left_out_sigma_
        self.slowdowns_: dict[int, _Slowdown] = {}
        for phase in np.unique(phases(points[beside])).tolist():
            rows = beside & (phases(points) == phase)
            made = self._fit_slowdown(points[rows], medians[rows])
            expected[rows] -= made.residual_.left_out_
            unsure[rows] = made.residual_.left_out_sigma_
            self.slowdowns_[phase] = made
        missed = np.log(y) - expected[which]
        kinds = phases(points)[which], beside[which]
        self.widths_ = self._widths(*kinds, missed / unsure[which])
        self.plain_widths_ = self._widths(*kinds, missed)

    def _fit_slowdown(self, part: Floats, medians: Floats) -> _Slowdown:
        ratio = medians / np.exp(self.alone_.predict(without_neighbour(part))[0])
        own, beside = self._asked(part)
        return _Slowdown().fit(own, beside, column(part, "units"), ratio, groups(part, MIX))

    def _widths(self, phase: NDArray[np.intp], beside: NDArray[np.bool_], scores: Floats) -> dict[_Key, float]:
        """Scores that `coverage` of the left-out runs stay under, by phase and company."""
        widths: dict[_Key, float] = {}
        for key in {(int(p), bool(b)) for p, b in zip(phase, beside, strict=True)}:
            mine = np.sort(scores[(phase == key[0]) & (beside == key[1])])
            rank = min(len(mine), int(np.ceil((len(mine) + 1) * self.coverage))) - 1
            widths[key] = max(0.0, float(mine[rank]))
        return widths

    def width(self, phase: int, beside: bool) -> float:
        """Standard deviations from the expected log seconds to their upper bound."""
        return self.widths_.get((phase, beside), max(self.widths_.values()))

    def plain_width(self, phase: int) -> float:
        """Log of the upper bound beside a neighbour over the expected seconds, the same everywhere."""
        return self.plain_widths_.get((phase, True), max(self.plain_widths_.values()))

    def _predict(self, X: Floats) -> Floats:  # noqa: N803
        return np.exp(self._logs(X)[0])

    def predict_upper(self, X: Any) -> Floats:  # noqa: N803
        """Seconds that single runs stay under: float64[n]."""
        X = self._checked(X)  # noqa: N806
        logs, sigma = self._logs(X)
        phase, beside = phases(X), _beside(X)
        width = np.array([self.width(int(p), bool(b)) for p, b in zip(phase, beside, strict=True)])
        upper: Floats = np.exp(logs + width * sigma)
        return upper

    def doubt(self, X: Any) -> Floats:  # noqa: N803
        """Log standard deviation of the prediction: float64[n]."""
        return self._logs(self._checked(X))[1]

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
        X = np.asarray(X, dtype=np.float64)  # noqa: N806
        self._check(X)
        return X

    def _logs(self, X: Floats) -> tuple[Floats, Floats]:  # noqa: N803
        logs, sigma = self.alone_.predict(without_neighbour(X))
        beside, phase = _beside(X), phases(X)
        for one in np.unique(phase[beside]).tolist():
            rows = beside & (phase == one)
            made = self.slowdowns_.get(one)
            if made is not None:
                slower, unsure = made.predict(*self._asked(X[rows]), column(X[rows], "units"))
                logs[rows] += slower
                sigma[rows] = unsure
        return logs, sigma

    def _asked(self, X: Floats) -> tuple[Floats, Floats]:  # noqa: N803
        """Bytes a second that each row's forward, and its neighbour, would move alone."""
        own = moved_bytes(X, self.model) / np.exp(self.alone_.predict(without_neighbour(X))[0])
        other = neighbours(X)
        beside = column(X, "contender_bytes_s").copy()
        real = phases(other) > 0
        if real.any():
            seconds = np.exp(self.alone_.predict(other[real])[0])
            beside[real] = moved_bytes(other[real], self.model) / seconds
        return own, beside


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


def _beside(X: Floats) -> NDArray[np.bool_]:  # noqa: N803
    beside: NDArray[np.bool_] = column(X, "neighbour_units") > 0
    return beside
