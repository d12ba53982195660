"""What physics leaves: a smooth correction in log space that says how sure it is, and fades where nothing was seen."""

from __future__ import annotations

import warnings
from typing import Self

import numpy as np
from sklearn.ensemble import HistGradientBoostingRegressor
from sklearn.exceptions import ConvergenceWarning
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import ConstantKernel, Matern, WhiteKernel
from sklearn.model_selection import KFold

from smpart.predictor.estimators.base import Floats

MOST = 700
"""Rows up to which a Gaussian process is fitted (its cost grows with their cube); boosted trees from there on."""
_TUNED = 200
"""Rows, chosen at random, that length scales and noise are found from; all of them are then learnt with these."""
_FEWEST = 8
"""Rows below which nothing is corrected."""
_FOLDS = 5
GUESS = 0.15
"""Log standard deviation while nothing is known."""


class Residual:
    """A correction over a few coordinates: float64[n, d] to logs float64[n].

    With few rows a Gaussian process (Matern 5/2, one length scale a coordinate), with many of them gradient-boosted
    trees.

    Attributes:
        noise_: log standard deviation of single rows that no further one would take away, as far as it was found.
    """

    def fit(self, Z: Floats, logs: Floats) -> Self:  # noqa: N803
        """Learn what is left of log seconds."""
        self.center_, self.width_ = Z.mean(axis=0), np.maximum(Z.std(axis=0), 1e-3)
        self.process_: GaussianProcessRegressor | None = None
        self.trees_: HistGradientBoostingRegressor | None = None
        self.sigma_, self.noise_ = GUESS, 0.0
        if _FEWEST <= len(Z) <= MOST:
            self._fit_process(self._scaled(Z), logs)
        elif len(Z) > MOST:
            self._fit_trees(self._scaled(Z), logs)
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
        learnt = self.process_ or self.trees_
        mean = learnt.predict(scaled) if learnt is not None else np.zeros(len(Z))
        return mean, np.full(len(Z), self.sigma_)

    def _scaled(self, Z: Floats) -> Floats:  # noqa: N803
        scaled: Floats = (Z - self.center_) / self.width_
        return scaled

    def _fit_process(self, scaled: Floats, logs: Floats) -> None:
        kernel = ConstantKernel(0.01, (1e-6, 1.0)) * Matern(np.full(scaled.shape[1], 1.5), (0.3, 30.0), nu=2.5)
        kernel += WhiteKernel(1e-3, (1e-6, 0.05))
        some = np.random.default_rng(0).permutation(len(logs))[:_TUNED]
        process = GaussianProcessRegressor(kernel, alpha=1e-8, random_state=0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # a length scale at its bound: the coordinate is idle
            process.fit(scaled[some], logs[some])
        if len(logs) > _TUNED:
            process = GaussianProcessRegressor(process.kernel_, alpha=1e-8, optimizer=None).fit(scaled, logs)
        self.process_ = process
        self.noise_ = float(np.sqrt(process.kernel_.k2.noise_level))

    def _fit_trees(self, scaled: Floats, logs: Floats) -> None:
        trees = HistGradientBoostingRegressor(
            max_iter=400, learning_rate=0.08, min_samples_leaf=5, early_stopping=False, random_state=0
        )
        missed = np.empty(len(logs))
        for train, test in KFold(_FOLDS, shuffle=True, random_state=0).split(scaled):
            missed[test] = logs[test] - trees.fit(scaled[train], logs[train]).predict(scaled[test])
        self.sigma_ = max(float(np.std(missed)), 1e-6)
        self.trees_ = trees.fit(scaled, logs)
