"""Seconds of a forward alone on some units, phase by phase, never less on fewer units."""

from __future__ import annotations

from typing import Self

import numpy as np
from sklearn.isotonic import isotonic_regression

from smpart.partition import ModelShape
from smpart.predictor.estimators.base import UNITS, Floats, column
from smpart.predictor.estimators.hybrid import Hybrid
from smpart.predictor.estimators.phase import (
    DECODE,
    HYBRID,
    NAMES,
    PREFILL,
    Phase,
    decode_place,
    phases,
    prefill_place,
    with_context,
)
from smpart.predictor.estimators.physics import decode_amounts, prefill_amounts

_KNOWN = 12
"""Prefills, and decode steps, from which on hybrid steps go by what their parts take."""


class Alone:
    """Log seconds of forwards without a neighbour, and how unsure they are.

    Args:
        model: dimensions of the model that was measured.
        whole: units of the whole device.
    """

    def __init__(self, model: ModelShape, whole: float) -> None:
        self.model = model
        self.whole = whole

    def fit(self, X: Floats, y: Floats) -> Self:  # noqa: N803
        """Learn from distinct points float64[n, columns] and their seconds float64[n]."""
        kind = phases(X)
        self.counts_ = np.unique(column(X, "units"))
        self.phases_: dict[int, Phase] = {}
        for phase in (PREFILL, DECODE):
            rows = kind == phase
            if rows.any():
                part = X[rows]
                self.phases_[phase] = Phase(self.whole).fit(*self._inputs(phase, part), column(part, "units"), y[rows])
        self.parts_ = len(self.phases_) == 2
        self.hybrid_ = Hybrid(self.model, self.whole)
        self.hybrids_ = bool((kind == HYBRID).any())
        if self.hybrids_:
            trusted = all(made.rows_ >= _KNOWN for made in self.phases_.values())
            part = X[kind == HYBRID]
            self.hybrid_.fit(part, self._parts(part), y[kind == HYBRID], trusted)
        return self

    def predict(self, X: Floats) -> tuple[Floats, Floats]:  # noqa: N803
        """Log seconds and their standard deviation: float64[n] each. Raises `ValueError` for a phase never seen."""
        units = column(X, "units")
        counts = np.union1d(self.counts_, units)
        return self.over(X, counts)[np.arange(len(X)), np.searchsorted(counts, units)], self.unsure(X)

    def over(self, X: Floats, counts: Floats) -> Floats:  # noqa: N803
        """Log seconds on each of ascending counts of units, whatever units `X` names: float64[n, len(counts)]."""
        logs = np.column_stack([self._on(X, np.full(len(X), count))[0] for count in counts])
        if len(counts) == 1:
            return logs
        return np.array([isotonic_regression(row, increasing=False) for row in logs])

    def unsure(self, X: Floats) -> Floats:  # noqa: N803
        """Standard deviation of the log seconds: float64[n]."""
        return self._on(X, column(X, "units"), deviate=True)[1]

    def noise(self, X: Floats) -> Floats:  # noqa: N803
        """The part of it that no further measurement would take away: float64[n]."""
        by_phase = {phase: made.residual.noise_ for phase, made in self.phases_.items()} | {HYBRID: self.hybrid_.noise}
        return np.array([by_phase.get(int(phase), 0.0) for phase in phases(X)])

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
        if phase == HYBRID and (self.hybrids_ or self.parts_):
            return self.hybrid_.predict(part, self._parts(part), deviate)
        made = self.phases_.get(phase)
        if made is None:
            name = NAMES.get(phase, "forward")
            raise ValueError(f"no {name} was measured alone: there is nothing to predict it from")
        return made.predict(*self._inputs(phase, part), column(part, "units"), deviate)

    def _inputs(self, phase: int, part: Floats) -> tuple[Floats, Floats]:
        """Amounts and place of one phase's rows."""
        if phase == PREFILL:
            place = with_context(prefill_place(part), column(part, "prefill_context"))
            return prefill_amounts(part, self.model), place
        return decode_amounts(part, self.model), with_context(decode_place(part), column(part, "decode_context"))

    def _parts(self, part: Floats) -> Floats | None:
        """Log seconds of both parts of hybrid steps, each alone: float64[n, 2]; None if one was never measured."""
        if not self.parts_:
            return None
        return np.column_stack([self._phase(one, part)[0] for one in (PREFILL, DECODE)])
