"""About how long forwards will take, so that a sweep spends its time wisely: a prior, put right where measured."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from smpart.partition import Shape
from smpart.profiler.sample import Point

Expected = Callable[[Shape, int, Shape], float]
"""Seconds of a forward: its shape, its units, and the shape beside it (empty: none)."""

_AXES = 6
_NEAREST = 3
_APART = 3.0
"""Distance between forwards that are alone and those that are not."""


class Forecast:
    """Scales the prior by how it was off at the nearest points measured so far."""

    def __init__(self, prior: Expected) -> None:
        self._prior = prior
        self._places = np.empty((0, _AXES))
        self._off = np.empty(0)

    def learn(self, point: Point, seconds: float) -> None:
        """A point took so long."""
        off = math.log(seconds / self._prior(point.shape, point.units, point.neighbour))
        self._places, self._off = np.vstack([self._places, _place(point)]), np.append(self._off, off)

    def __call__(self, point: Point) -> float:
        """Seconds to expect."""
        return self._prior(point.shape, point.units, point.neighbour) * math.exp(self._correction(point))

    def _correction(self, point: Point) -> float:
        if not len(self._off):
            return 0.0
        distance = np.linalg.norm(self._places - _place(point), axis=1)
        nearest = np.argsort(distance, kind="stable")[:_NEAREST]
        weights = 1.0 / (0.1 + distance[nearest])
        return float(np.average(self._off[nearest], weights=weights))


def _place(point: Point) -> NDArray[np.float64]:
    shape = point.shape
    sizes = (shape.prefill_tokens, shape.prefill_context, shape.decode_batch, shape.decode_context)
    logs = np.log1p(np.array(sizes, dtype=np.float64))
    return np.array([*logs, math.log(point.units), 0.0 if point.alone else _APART])
