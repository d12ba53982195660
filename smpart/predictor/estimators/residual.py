"""What physics leaves: a smooth correction in log space that says how sure it is, and fades where nothing was seen."""

from __future__ import annotations

import warnings
from typing import Self

import numpy as np
from numpy.typing import NDArray
from sklearn.ensemble import HistGradientBoostingRegressor
from sklearn.exceptions import ConvergenceWarning
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import ConstantKernel, Matern, WhiteKernel
from sklearn.model_selection import GroupKFold

from smpart.predictor.estimators.base import Floats

MOST = 700
"""Rows up to which a Gaussian process is fitted (its cost grows with their cube); boosted trees from there on."""
_FEWEST = 8
"""Rows below which nothing is corrected."""
_FOLDS = 5
GUESS = 0.15
"""Log standard deviation while nothing is known."""


class Residual:
    """A correction over a few coordinates.

    With few rows a Gaussian process (Matern 5/2, one length scale a coordinate), with many of them gradient-boosted
    trees. Either way `left_out_` holds what it would have missed each row by, had it not seen the row's kind, and
    `left_out_sigma_` how unsure it would have been.
    """

    def fit(self, Z: Floats, logs: Floats, kinds: NDArray[np.intp]) -> Self:  # noqa: N803
        """Learn logs float64[n] over coordinates float64[n, d]; rows of equal kind are left out together."""
        self.center_, self.width_ = Z.mean(axis=0), np.maximum(Z.std(axis=0), 1e-3)
        self.process_: GaussianProcessRegressor | None = None
        self.trees_: HistGradientBoostingRegressor | None = None
        scaled = self._scaled(Z)
        if len(Z) < _FEWEST or len(np.unique(kinds)) < _FOLDS:
            self.left_out_, self.sigma_ = logs, GUESS
            self.left_out_sigma_ = np.full(len(logs), GUESS)
        elif len(Z) <= MOST:
            self._fit_process(scaled, logs, kinds)
        else:
            self._fit_trees(scaled, logs, kinds)
        return self

    def predict(self, Z: Floats, deviate: bool = True) -> tuple[Floats, Floats]:  # noqa: N803
        """Mean and standard deviation of the log correction, noise included: float64[n] each.

        Args:
            deviate: whether the standard deviation is wanted, which takes most of the time; else it is the usual one.
        """
        scaled = self._scaled(Z)
        if self.process_ is not None and deviate:
            mean, sigma = self.process_.predict(scaled, return_std=True)
            return mean, sigma
        if self.process_ is not None:
            return self.process_.predict(scaled), np.full(len(Z), self.sigma_)
        mean = self.trees_.predict(scaled) if self.trees_ is not None else np.zeros(len(Z))
        return mean, np.full(len(Z), self.sigma_)

    def _scaled(self, Z: Floats) -> Floats:  # noqa: N803
        scaled: Floats = (Z - self.center_) / self.width_
        return scaled

    def _fit_process(self, scaled: Floats, logs: Floats, kinds: NDArray[np.intp]) -> None:
        dims = scaled.shape[1]
        kernel = ConstantKernel(0.01, (1e-6, 1.0)) * Matern(np.full(dims, 1.5), (0.3, 30.0), nu=2.5)
        kernel += WhiteKernel(1e-3, (1e-6, 0.05))
        process = GaussianProcessRegressor(kernel, alpha=1e-8, random_state=0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # a length scale at its bound: the coordinate is idle
            process.fit(scaled, logs)
        self.process_ = process
        self.left_out_, self.left_out_sigma_ = _left_out(process, scaled, logs, kinds)
        self.sigma_ = float(np.std(self.left_out_))

    def _fit_trees(self, scaled: Floats, logs: Floats, kinds: NDArray[np.intp]) -> None:
        trees = HistGradientBoostingRegressor(
            max_iter=400, learning_rate=0.08, min_samples_leaf=5, early_stopping=False, random_state=0
        )
        self.left_out_ = np.empty(len(logs))
        for train, test in GroupKFold(_FOLDS).split(scaled, logs, kinds):
            self.left_out_[test] = logs[test] - trees.fit(scaled[train], logs[train]).predict(scaled[test])
        self.trees_ = trees.fit(scaled, logs)
        self.sigma_ = max(float(np.std(self.left_out_)), 1e-6)
        self.left_out_sigma_ = np.full(len(logs), self.sigma_)


def _left_out(
    process: GaussianProcessRegressor, scaled: Floats, logs: Floats, kinds: NDArray[np.intp]
) -> tuple[Floats, Floats]:
    """What a Gaussian process misses each row by, and how unsure it is, when all rows of its kind are left out.

    In closed form: Rasmussen and Williams, Gaussian Processes for Machine Learning, section 5.4.2, by blocks.
    """
    covariance = process.kernel_(scaled) + process.alpha * np.eye(len(scaled))
    inverse = np.linalg.inv(covariance)
    alpha = inverse @ logs
    missed, sigma = np.empty(len(logs)), np.empty(len(logs))
    for kind in np.unique(kinds):
        rows = np.flatnonzero(kinds == kind)
        block = np.linalg.inv(inverse[np.ix_(rows, rows)])
        missed[rows], sigma[rows] = block @ alpha[rows], np.sqrt(np.diag(block))
    return missed, sigma
