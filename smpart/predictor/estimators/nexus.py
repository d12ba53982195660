"""Nexus's cost of a phase: per operator the longer of arithmetic and traffic (arXiv 2507.06608, section 4)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from smpart.predictor.estimators.base import NEIGHBOUR, SHAPE, UNITS, Floats, LatencyEstimator, column
from smpart.predictor.estimators.forms import (
    Mask,
    Work,
    alone,
    has_decode,
    has_prefill,
    kernels,
    positive_fit,
    solo_rows,
    thinned,
)

_KERNELS = 4
_STRENGTHS = np.linspace(0.0, 2.0, 41)
"""How strongly a neighbour's traffic may count: values that are tried."""


def effective_share(share: Floats | float, saturation: float, decay: float) -> Floats:
    """Share of the whole device's arithmetic that a share of its units yields.

    In proportion up to `saturation`; beyond it each further unit yields less, falling off at rate `decay`.

    >>> [round(float(effective_share(share, 0.8, 1e6)), 3) for share in (0.4, 0.8, 1.0)]
    [0.4, 0.8, 0.8]
    """
    share = np.asarray(share)
    beyond = np.maximum(0.0, share - saturation)
    return np.minimum(share, saturation) + -np.expm1(-decay * beyond) / decay


class _Constants(NamedTuple):
    """Constants of the form: rates of each kernel class (as `forms.kernels` orders them), and what they depend on.

    Attributes:
        flops, bandwidth: operations and bytes a second on the whole device: float64[4] each.
        fixed: seconds of a prefill and of a decode that no operator explains.
        saturation: share of the units up to which arithmetic grows in proportion.
        decay: how fast gains fall off beyond it.
    """

    flops: Floats
    bandwidth: Floats
    fixed: Floats
    saturation: float
    decay: float

    @classmethod
    def of(cls, flat: Floats) -> _Constants:
        flops, bandwidth, fixed = np.split(flat[: 2 * _KERNELS + 2], [_KERNELS, 2 * _KERNELS])
        return cls(flops, bandwidth, fixed, float(flat[-2]), float(flat[-1]))


class _Asked(NamedTuple):
    """What rows ask of the device: kernel classes, the share of the units, which phases."""

    kernels: list[Work]
    share: Floats
    prefills: Mask
    decodes: Mask

    @property
    def attention_bytes(self) -> Floats:
        return self.kernels[1].bytes + self.kernels[3].bytes


class Nexus(LatencyEstimator):
    """``sum over operators of max(compute, memory)``, arithmetic in proportion to the share of units until saturation.

    Beside a neighbour the bandwidth of attention is shared in proportion to bytes of attention, the neighbour's
    weighted by the share of its time that attention takes.

    Completed here, since the exact form beyond saturation is not in the paper's text: gains fall off exponentially,
    rates are fitted for each operator class, each phase has a constant of its own, both phases share the bandwidth
    as the paper's decode does, with a fitted strength, and a hybrid forward is the sum of both phases.

    Attributes:
        constants_: as fitted.
        strength_: how strongly a neighbour's traffic counts; 1 is the paper's.
    """

    def _fit(self, X: Floats, y: Floats) -> None:  # noqa: N803
        rows = thinned(solo_rows(X))
        self.constants_ = self._fit_constants(self._asked(X[rows]), y[rows])
        self.strength_ = 1.0
        beside = ~alone(X)
        if beside.any():
            asked, taken, actual = self._asked(X[beside]), self._taken(X[beside]), y[beside]
            off = [np.abs(np.log(_seconds(asked, self.constants_, s * taken) / actual)).sum() for s in _STRENGTHS]
            self.strength_ = float(_STRENGTHS[int(np.argmin(off))])

    @staticmethod
    def _fit_constants(asked: _Asked, y: Floats) -> _Constants:
        flops = [2.0 * max(1.0, float(np.max(work.flops / y))) for work in asked.kernels]
        moved = [2.0 * max(1.0, float(np.max(work.bytes / y))) for work in asked.kernels]
        flops[-1] *= 10.0  # decode's attention is bound by traffic; where both fit alike, that is what to start from
        fixed = 0.5 * float(y.min())
        starts = [np.array([*flops, *moved, fixed, fixed, saturation, 1.0]) for saturation in (0.4, 0.9)]
        return _Constants.of(positive_fit(lambda flat: _seconds(asked, _Constants.of(flat), 0.0), starts, y))

    def _predict(self, X: Floats) -> Floats:  # noqa: N803
        return _seconds(self._asked(X), self.constants_, self.strength_ * self._taken(X))

    def _asked(self, X: Floats) -> _Asked:  # noqa: N803
        return _Asked(kernels(X, self.model), column(X, "units") / self.units, has_prefill(X), has_decode(X))

    def _taken(self, X: Floats) -> Floats:  # noqa: N803
        """Bytes of attention the neighbour moves for each of one's own, by the share of its time spent in attention."""
        taken = np.zeros(len(X))
        beside = column(X, "neighbour_units") > 0.0
        if beside.any():
            neighbour = np.zeros_like(X[beside])
            neighbour[:, SHAPE] = X[beside][:, NEIGHBOUR]
            neighbour[:, UNITS] = column(X[beside], "neighbour_units")
            theirs, own = self._asked(neighbour), self._asked(X[beside])
            operators = _operators(theirs, self.constants_, 0.0)
            weight = (operators[1] + operators[3]) / _seconds(theirs, self.constants_, 0.0)
            taken[beside] = weight * theirs.attention_bytes / np.maximum(own.attention_bytes, 1.0)
        return taken


def _seconds(asked: _Asked, constants: _Constants, taken: Floats | float) -> Floats:
    fixed = constants.fixed[0] * asked.prefills + constants.fixed[1] * asked.decodes
    return np.asarray(np.maximum(sum(_operators(asked, constants, taken)) + fixed, 1e-12))


def _operators(asked: _Asked, constants: _Constants, taken: Floats | float) -> list[Floats]:
    """Seconds of each kernel class, while a neighbour moves `taken` bytes for each byte of attention moved here."""
    share = effective_share(asked.share, constants.saturation, constants.decay)
    rates = zip(asked.kernels, constants.flops, constants.bandwidth, (0.0, taken, 0.0, taken), strict=True)
    return [
        np.maximum(work.flops / (flops * share), work.bytes / bandwidth * (1.0 + more))
        for work, flops, bandwidth, more in rates
    ]
