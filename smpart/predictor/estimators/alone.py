"""Seconds of a forward alone on some units: physics, times what physics leaves, phase by phase."""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

import numpy as np
from numpy.typing import NDArray
from sklearn.isotonic import isotonic_regression

from smpart.partition import ModelShape
from smpart.predictor.accuracy import groups
from smpart.predictor.estimators.base import SHAPE, UNITS, Floats, column
from smpart.predictor.estimators.physics import Physics, decode_amounts, prefill_amounts
from smpart.predictor.estimators.residual import GUESS, MOST, Residual

Amounts = Callable[[Floats, ModelShape], Floats]
Phases = NDArray[np.intp]

PREFILL, DECODE, HYBRID = 1, 2, 3


def phases(X: Floats) -> Phases:  # noqa: N803
    """What each row's forward is: `PREFILL`, `DECODE` or `HYBRID`; 0: nothing."""
    found: Phases = (column(X, "prefill_tokens") > 0).astype(np.intp) + 2 * (column(X, "decode_batch") > 0)
    return found


def prefill_place(X: Floats) -> Floats:  # noqa: N803
    """Where a prefill lies: log2 of its tokens, and of the tokens each of them attends to on average."""
    tokens = np.maximum(column(X, "prefill_tokens"), 1.0)
    return np.column_stack([np.log2(tokens), np.log2(1.0 + column(X, "prefill_pairs") / tokens)])


def decode_place(X: Floats) -> Floats:  # noqa: N803
    """Where a decode step lies: log2 of its sequences, and of the tokens each of them attends to on average."""
    rows = np.maximum(column(X, "decode_batch"), 1.0)
    return np.column_stack([np.log2(rows), np.log2(1.0 + column(X, "decode_context") / rows)])


class _Phase:
    """One phase: its physics, then its residual over place and units.

    Args:
        whole: units of the whole device.
    """

    def __init__(self, whole: float) -> None:
        self.physics = Physics(whole)
        self.residual = Residual()

    def fit(self, amounts: Floats, place: Floats, units: Floats, y: Floats, kinds: NDArray[np.intp]) -> Self:
        self.physics.fit(amounts, units, y)
        self.scales_ = len(np.unique(units)) > 1
        self.residual.fit(self._where(place, units), np.log(y / self.physics.predict(amounts, units)), kinds)
        return self

    def predict(self, amounts: Floats, place: Floats, units: Floats, deviate: bool) -> tuple[Floats, Floats]:
        """Log seconds and, where wanted, their standard deviation."""
        mean, sigma = self.residual.predict(self._where(place, units), deviate)
        return np.log(self.physics.predict(amounts, units)) + mean, sigma

    def _where(self, place: Floats, units: Floats) -> Floats:
        return np.column_stack([place, np.log2(units)]) if self.scales_ else place


class Alone:
    """Log seconds of forwards without a neighbour, and how unsure they are; never falling when units are taken away.

    A hybrid step is learnt from what its two parts are predicted to take alone. Without any measured one it is taken
    to be as long as both parts one after the other, which is never too short.

    Args:
        model: dimensions of the model that was measured.
        whole: units of the whole device.
    """

    def __init__(self, model: ModelShape, whole: float) -> None:
        self.model = model
        self.whole = whole

    def fit(self, X: Floats, y: Floats) -> Self:  # noqa: N803
        """Learn from distinct points float64[n, columns] and their seconds float64[n]."""
        self.phases_: dict[int, _Phase] = {}
        self.left_out_, self.left_out_sigma_ = np.zeros(len(X)), np.ones(len(X))
        self.counts_ = np.unique(column(X, "units"))
        kind, shape = phases(X), groups(X, SHAPE)
        for phase in (PREFILL, DECODE, HYBRID):
            rows = kind == phase
            if not rows.any():
                continue
            self.wide_ = int(rows.sum()) > MOST
            part, units = X[rows], column(X[rows], "units")
            made = _Phase(self.whole).fit(*self._inputs(phase, part), units, y[rows], shape[rows])
            self.left_out_[rows], self.left_out_sigma_[rows] = made.residual.left_out_, made.residual.left_out_sigma_
            self.phases_[phase] = made
        self._fit_narrow(X[kind == HYBRID], y[kind == HYBRID], shape[kind == HYBRID])
        return self

    def _fit_narrow(self, X: Floats, y: Floats, kinds: NDArray[np.intp]) -> None:  # noqa: N803
        """Hybrid steps by nothing but what their parts take, for those who know only that."""
        self.narrow_: _Phase | None = None
        if len(X) and {PREFILL, DECODE} <= self.phases_.keys():
            logs = self._parts(X)
            units = column(X, "units")
            self.narrow_ = _Phase(self.whole).fit(_sums(logs), logs / np.log(2.0), units, y, kinds)

    def joined(self, logs: Floats, units: float) -> tuple[Floats, Floats]:
        """Log seconds and their deviation of hybrid steps, by the log seconds of both parts: float64[n, 2]."""
        if self.narrow_ is None:
            return np.logaddexp(logs[:, 0], logs[:, 1]), np.full(len(logs), GUESS)
        return self.narrow_.predict(_sums(logs), logs / np.log(2.0), np.full(len(logs), float(units)), deviate=True)

    def predict(self, X: Floats) -> tuple[Floats, Floats]:  # noqa: N803
        """Log seconds and their standard deviation: float64[n] each. Raises `ValueError` for a phase never seen."""
        units = column(X, "units")
        counts = np.union1d(self.counts_, units)
        logs = self.over(X, counts)
        return logs[np.arange(len(X)), np.searchsorted(counts, units)], self.unsure(X)

    def over(self, X: Floats, counts: Floats) -> Floats:  # noqa: N803
        """Log seconds on each of ascending counts of units, whatever units `X` names: float64[n, len(counts)]."""
        logs = np.column_stack([self._on(X, np.full(len(X), count))[0] for count in counts])
        if len(counts) == 1:
            return logs
        return np.array([isotonic_regression(row, increasing=False) for row in logs])

    def unsure(self, X: Floats) -> Floats:  # noqa: N803
        """Standard deviation of the log seconds: float64[n]."""
        return self._on(X, column(X, "units"), deviate=True)[1]

    def _on(self, X: Floats, units: Floats, deviate: bool = False) -> tuple[Floats, Floats]:  # noqa: N803
        """Log seconds on so many units, as the phases say it, and standard deviations if they are wanted (slow)."""
        logs, sigma = np.empty(len(X)), np.empty(len(X))
        kind = phases(X)
        for phase in np.unique(kind).tolist():
            rows = kind == phase
            part = X[rows].copy()
            part[:, UNITS] = units[rows]
            logs[rows], sigma[rows] = self._phase(phase, part, deviate)
        return logs, sigma

    def _phase(self, phase: int, part: Floats, deviate: bool = False) -> tuple[Floats, Floats]:
        made = self.phases_.get(phase)
        if made is not None:
            return made.predict(*self._inputs(phase, part), column(part, "units"), deviate)
        if phase == HYBRID and {PREFILL, DECODE} <= self.phases_.keys():
            return self.joined(self._parts(part), self.whole)
        name = {PREFILL: "prefill", DECODE: "decode step", HYBRID: "hybrid step"}.get(phase, "forward")
        raise ValueError(f"no {name} was measured: there is nothing to predict it from")

    def _inputs(self, phase: int, part: Floats) -> tuple[Floats, Floats]:
        """Amounts and place of one phase's rows."""
        if phase == PREFILL:
            return prefill_amounts(part, self.model), _with(prefill_place(part), column(part, "prefill_context"))
        if phase == DECODE:
            return decode_amounts(part, self.model), _with(decode_place(part), column(part, "decode_context"))
        if not {PREFILL, DECODE} <= self.phases_.keys():
            both = prefill_amounts(part, self.model), decode_amounts(part, self.model)
            return np.hstack(both), np.hstack([prefill_place(part), decode_place(part)])
        logs = self._parts(part)
        place = logs / np.log(2.0)
        return _sums(logs), np.hstack([place, prefill_place(part), decode_place(part)]) if self.wide_ else place

    def _parts(self, part: Floats) -> Floats:
        """Log seconds of both parts of hybrid steps, each alone: float64[n, 2]."""
        return np.column_stack([self._phase(one, part)[0] for one in (PREFILL, DECODE)])


def _with(place: Floats, context: Floats) -> Floats:
    """A place, and log2 of all tokens in memory: what grows with those alone is then smooth along one coordinate."""
    return np.column_stack([place, np.log2(1.0 + context)])


def _sums(logs: Floats) -> Floats:
    """Amounts that a hybrid step's seconds are a sum of: a fixed part, and those of both parts."""
    return np.column_stack([np.ones(len(logs)), np.exp(logs)])
