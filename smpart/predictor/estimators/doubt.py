"""How unsure a model of what was measured so far is about what was not: it tells a sweep where to measure next."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from smpart.partition import ModelShape
from smpart.predictor.estimators.base import Floats
from smpart.predictor.estimators.contention import Contention
from smpart.profiler.pace import paces
from smpart.profiler.sample import Point, Sample, matrix, targets


class Doubt:
    """Fits `Contention` to the samples and gives its log standard deviation; called once a batch of points.

    Args:
        model: dimensions of the model that is measured.
        units: units of the whole device.
    """

    def __init__(self, model: ModelShape, units: int) -> None:
        self._model, self._units = model, units

    def __call__(self, samples: Sequence[Sample], points: Sequence[Point]) -> Floats:
        """How unsure about each point: float64[n], relative. All alike while too little was measured to say."""
        try:
            usual = targets(samples) / paces(samples)
            fitted = Contention(self._model, self._units).fit(matrix(s.point for s in samples), usual)
            return fitted.doubt(matrix(points))
        except ValueError:  # a phase without any sample: the design's own order is as good as any
            return np.ones(len(points))
