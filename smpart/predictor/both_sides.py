"""Both sides of every split in one go: what `Tables` say split by split, over all of them with numpy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from smpart.predictor.surface import Surface

Floats = NDArray[np.float64]
Ints = NDArray[np.intp]

_LOG2_E = 1.4426950408889634


class BothSides:
    """The surfaces of some splits, stacked so that one look-up reads them all.

    Args:
        alone: of the decode step, then of the prefill: a surface a split, log seconds alone.
        slower: likewise: log slowdown over what the side and its neighbour ask of the memory (log2 bytes a second).
    """

    def __init__(self, alone: Sequence[Sequence[Surface]], slower: Sequence[Sequence[Surface]]) -> None:
        self._first = [side[0] for side in alone]
        self._alone = [np.array([surface.values for surface in side]).T.copy() for side in alone]
        self._slower, self._slower_base = _stack(slower)
        first = [side[0] for side in slower]
        self._x, self._per_x = _column([s.x for s in first]), _column([s.per_x for s in first])
        self._z, self._per_z = _column([s.z for s in first]), _column([s.per_z for s in first])
        self._last_x, self._last_z = _column([s.last_x for s in first]), _column([s.last_z for s in first])
        self._last_column = self._last_z - 1.0
        columns = np.array([[s.columns] for s in first], dtype=np.intp)
        self._columns = columns.astype(np.float64)
        zero = np.zeros_like(columns)
        self._corners = np.array([[zero, zero + 1], [columns, columns + 1]])

    def seconds(self, places: Sequence[tuple[float, float]], asked: Sequence[float]) -> Floats:
        """Seconds of the step and of the prefill, each beside the other: float64[2, splits].

        Args:
            places: where each side lies on its surfaces.
            asked: log2 of the bytes that each side moves.
        """
        alone = self._alone_log(places)
        rate = np.array([[asked[0]], [asked[1]]]) - alone * _LOG2_E
        seconds: Floats = np.exp(alone + self._slower_log(rate))
        return seconds

    def _alone_log(self, places: Sequence[tuple[float, float]]) -> Floats:
        logs: Floats = np.empty((2, self._alone[0].shape[1]))
        for side, (x, z) in enumerate(places):
            place, across, along = self._first[side].cell(x, z)
            values, columns = self._alone[side], self._first[side].columns
            low = (1.0 - along) * values[place] + along * values[place + 1]
            high = (1.0 - along) * values[place + columns] + along * values[place + columns + 1]
            logs[side] = (1.0 - across) * low + across * high
        return logs

    def _slower_log(self, rate: Floats) -> Floats:
        x = (rate - self._x) * self._per_x
        z = (rate[::-1] - self._z) * self._per_z
        row = np.maximum(np.minimum(np.trunc(x), self._last_x), 0.0)
        z = np.maximum(np.minimum(z, self._last_z), 0.0)
        column = np.minimum(np.trunc(z), self._last_column)
        place = (row * self._columns + column).astype(np.intp) + self._slower_base
        found = self._slower[place + self._corners]
        low = found[:, 0]
        low = low + (z - column) * (found[:, 1] - low)
        logs: Floats = low[0] + (x - row) * (low[1] - low[0])
        return logs


def _stack(sides: Sequence[Sequence[Surface]]) -> tuple[Floats, Ints]:
    """All values one behind the other; where each surface begins: intp[2, splits]."""
    every = [surface for side in sides for surface in side]
    starts = np.cumsum([0, *(len(surface.values) for surface in every)])[:-1].astype(np.intp)
    return np.concatenate([np.array(surface.values) for surface in every]), starts.reshape(len(sides), -1)


def _column(values: Sequence[float]) -> Floats:
    return np.array(values, dtype=np.float64).reshape(-1, 1)
