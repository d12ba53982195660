"""Bullet's roofline that scales with SMs, corrected by measured factors (arXiv 2504.19516, section 3.2)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from sklearn.neighbors import KNeighborsRegressor

from smpart.predictor.estimators.base import Floats, LatencyEstimator, column
from smpart.predictor.estimators.forms import Work, alone, has_prefill, kernels, positive_fit, solo_rows, thinned

_NEIGHBOURS = 4
"""Measured points that a correction is interpolated between."""

_SHARES = np.linspace(0.2, 1.0, 41)
"""Shares of the bandwidth that are tried for what a neighbour leaves."""


def roofline(
    flops: Floats | float,
    moved: Floats | float,
    units: Floats | float,
    *,
    whole: float,
    peak_flops: float,
    bandwidth: Floats | float,
    knee: float,
) -> Floats:
    """Seconds of a kernel on some units: ``flop / min(flop / mem * D, C)``.

    Arithmetic ``C`` grows in proportion to the units, the bandwidth ``D`` up to `knee` of them.

    >>> round(float(roofline(2e12, 1e9, 54, whole=108, peak_flops=312e12, bandwidth=2e12, knee=30)) * 1e3, 2)
    12.82
    """
    arithmetic = np.asarray(flops) / (peak_flops * np.asarray(units) / whole)
    traffic = np.asarray(moved) / (bandwidth * np.minimum(1.0, np.asarray(units) / knee))
    return np.maximum(arithmetic, traffic)


class Bullet(LatencyEstimator):
    """Sum of kernel classes' rooflines, by a factor ``alpha`` = measured over predicted, interpolated between samples.

    Kernel classes are the linear layers and the attention of each phase. The peaks and the knee are fitted, where the
    authors take data sheets. Beside a neighbour the bandwidth is what was left beside one of that size.

    Completed here: ``alpha`` is interpolated in the logarithms of the sizes and of the units, the left bandwidth
    between the sizes of neighbours, and prefill has the like of what the paper measures for decode.

    Attributes:
        constants_: peak flops a second, peak bytes a second, and the knee in units.
        left_: by whether the row prefills: octaves of the size of neighbours, and the share of bandwidth each leaves.
    """

    def _fit(self, X: Floats, y: Floats) -> None:  # noqa: N803
        rows = solo_rows(X)
        self.constants_ = self._fit_peaks(X[thinned(rows)], y[thinned(rows)])
        alpha = np.log(y[rows] / self._roofline(X[rows], 1.0))
        self.alpha_ = KNeighborsRegressor(min(_NEIGHBOURS, len(alpha)), weights="distance")
        self.alpha_.fit(_sizes(X[rows]), alpha)
        self.left_: dict[bool, tuple[Floats, Floats]] = {}
        for prefills in (False, True):
            beside = ~alone(X) & (has_prefill(X) == prefills)
            if beside.any():
                self.left_[prefills] = self._fit_left(X[beside], y[beside])

    def _fit_peaks(self, X: Floats, y: Floats) -> Floats:  # noqa: N803
        work, units = kernels(X, self.model), column(X, "units")
        flops = max(1.0, float(np.max(sum(k.flops for k in work) / y)))
        moved = max(1.0, float(np.max(sum(k.bytes for k in work) / y)))
        starts = [np.array([2.0 * flops, 2.0 * moved, knee * self.units]) for knee in (0.3, 0.8)]
        return positive_fit(lambda constants: self._sum(work, units, constants, 1.0), starts, y)

    def _fit_left(self, X: Floats, y: Floats) -> tuple[Floats, Floats]:  # noqa: N803
        """For each octave of the neighbour's size the share of bandwidth under which predictions are least off."""
        alpha = self._alpha(X)
        off = np.stack([np.abs(np.log(self._roofline(X, share) * alpha / y)) for share in _SHARES])
        octaves: Floats = np.rint(np.log2(1.0 + _neighbour(X)))
        sizes = np.unique(octaves)
        return sizes, np.array([_SHARES[off[:, octaves == size].sum(axis=1).argmin()] for size in sizes])

    def _predict(self, X: Floats) -> Floats:  # noqa: N803
        share = np.ones(len(X))
        for prefills, (sizes, left) in self.left_.items():
            rows = ~alone(X) & (has_prefill(X) == prefills)
            share[rows] = np.interp(np.log2(1.0 + _neighbour(X[rows])), sizes, left)
        return self._roofline(X, share) * self._alpha(X)

    def _alpha(self, X: Floats) -> Floats:  # noqa: N803
        return np.asarray(np.exp(self.alpha_.predict(_sizes(X))))

    def _roofline(self, X: Floats, share: Floats | float) -> Floats:  # noqa: N803
        """Seconds without correction, with a share of the bandwidth."""
        return self._sum(kernels(X, self.model), column(X, "units"), self.constants_, share)

    def _sum(self, work: Sequence[Work], units: Floats, constants: Floats, share: Floats | float) -> Floats:
        peak_flops, bandwidth, knee = constants
        seconds = np.zeros(len(units))
        for kernel in work:
            seconds += roofline(
                kernel.flops,
                kernel.bytes,
                units,
                whole=self.units,
                peak_flops=peak_flops,
                bandwidth=bandwidth * share,
                knee=knee,
            )
        return np.maximum(seconds, 1e-12)


def _sizes(X: Floats) -> Floats:  # noqa: N803
    """Coordinates that corrections are interpolated in: float64[n, 6]."""
    names = ("prefill_tokens", "prefill_context", "prefill_chunks", "decode_batch", "decode_context", "units")
    return np.log1p(np.column_stack([column(X, name) for name in names]))


def _neighbour(X: Floats) -> Floats:  # noqa: N803
    """Tokens that the neighbour computes, or reads where it decodes."""
    return column(X, "neighbour_prefill_tokens") + column(X, "neighbour_decode_context")
