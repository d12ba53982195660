"""How slow the machine was at a moment: machines that are shared drift by more than what a profile is to tell apart."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import numpy as np
from sklearn.exceptions import ConvergenceWarning
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import ConstantKernel, Matern, WhiteKernel

from smpart.profiler.sample import Floats, Sample

_FEWEST = 8
"""Anchors below which nothing is said of the pace."""
_MOST = 600
"""Anchors that are looked at; of more, every so many-th."""
_STEADY = 1e-3
"""Log deviation of anchors below which the machine keeps its pace."""


def paces(samples: Sequence[Sample]) -> Floats:
    """Seconds at each sample's moment over those at the usual pace: float64[n].

    The anchors tell: points that are measured again and again. What they have in common, and hold for a while, is the
    machine's pace (a Gaussian process over time, with exponential memory); what each shows by itself is noise.
    """
    anchors: dict[object, list[Sample]] = {}
    for sample in samples:
        if sample.stage == "anchor":
            anchors.setdefault(sample.point, []).append(sample)
    moments, logs = [], []
    for mine in anchors.values():
        usual = np.median([sample.median for sample in mine])
        moments += [sample.moment for sample in mine]
        logs += [float(np.log(sample.median / usual)) for sample in mine]
    if len(logs) < _FEWEST or np.std(logs) < _STEADY:
        return np.ones(len(samples))
    every = -(-len(logs) // _MOST)
    start = min(moments)
    process = _fitted(np.array(moments[::every])[:, None] - start, np.array(logs[::every]))
    pace: Floats = np.exp(process.predict(np.array([[sample.moment - start] for sample in samples])))
    return pace


def _fitted(moments: Floats, logs: Floats) -> GaussianProcessRegressor:
    kernel = ConstantKernel(0.01, (1e-6, 1.0)) * Matern(30.0, (3.0, 3000.0), nu=0.5) + WhiteKernel(0.005, (1e-6, 0.1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # a bound reached: no drift, or nothing but noise
        return GaussianProcessRegressor(kernel, alpha=1e-8).fit(moments, logs)
