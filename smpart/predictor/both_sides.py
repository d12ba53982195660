"""Both sides of every split in one go: what `Tables` say split by split, over all of them with numpy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from smpart.predictor.surface import Surface

Floats = NDArray[np.float64]

_LOG2_E = 1.4426950408889634


class BothSides:
    """The surfaces of some splits, stacked so that one look-up reads them all.

    Args:
        alone: of the decode step, then of the prefill: a surface a split, log seconds alone.
        packed: of a prefill of many prompts, likewise.
        slower: likewise: log slowdown over what the side and its neighbour ask of the memory (log2 bytes a second).
    """

    def __init__(
        self, alone: Sequence[Sequence[Surface]], packed: Sequence[Surface], slower: Sequence[Sequence[Surface]]
    ) -> None:
        self._first = [side[0] for side in alone]
        self._alone = [_grid(side) for side in alone]
        self._packed = _grid(packed)
        self._slower, self._base = _stack(slower)
        first = [side[0] for side in slower]
        self._start = _axes([s.x for s in first], [s.z for s in first])
        self._per = _axes([s.per_x for s in first], [s.per_z for s in first])
        last = [s.last_z for s in first]
        self._least, self._most = _axes([-np.inf, -np.inf], [0.0, 0.0]), _axes([np.inf, np.inf], last)
        self._last = _axes([s.last_x for s in first], [z - 1 for z in last])
        columns = np.array([[s.columns] for s in first])
        self._columns, zero = columns.astype(np.float64), np.zeros_like(columns)
        self._corners = np.array([[zero, zero + 1], [columns, columns + 1]])

    def seconds(self, places: Sequence[tuple[float, float]], packing: float, asked: Sequence[float]) -> Floats:
        """Seconds of the step and of the prefill, each beside the other: float64[2, splits].

        Args:
            places: where each side lies on its surfaces.
            packing: where the prefill lies between one prompt (0) and many (1).
            asked: log2 of the bytes that each side moves.
        """
        logs = self._alone_log(places, packing)
        rate = logs * -_LOG2_E
        rate[0] += asked[0]
        rate[1] += asked[1]
        logs += self._slower_log(rate)
        return np.exp(logs, out=logs)

    def _alone_log(self, places: Sequence[tuple[float, float]], packing: float) -> Floats:
        logs: Floats = np.empty((2, self._alone[0].shape[2]))
        for side, (x, z) in enumerate(places):
            cell = self._first[side].cell(x, z)
            _look_up(self._alone[side], *cell, logs[side])
            if side and packing:
                many = _look_up(self._packed, *cell, np.empty_like(logs[side]))
                logs[side] = np.log((1.0 - packing) * np.exp(logs[side]) + packing * np.exp(many))
        return logs

    def _slower_log(self, rate: Floats) -> Floats:
        """By what each side asks for. Arrays are of both axes (own, neighbour's), both sides, all splits."""
        place = rate[_OWN_AND_OTHER]
        place -= self._start
        place *= self._per
        np.maximum(place, self._least, out=place)
        np.minimum(place, self._most, out=place)
        node = np.trunc(place)
        np.minimum(node, self._last, out=node)
        np.maximum(node, 0.0, out=node)
        place -= node
        first = node[0]
        first *= self._columns
        first += node[1]
        first += self._base
        found = self._slower.take(first.astype(np.intp) + self._corners)
        low, high = found[:, 0], found[:, 1]
        high -= low
        high *= place[1]
        low += high
        logs: Floats = low[1] - low[0]
        logs *= place[0]
        logs += low[0]
        return logs


_OWN_AND_OTHER = np.array([[0, 1], [1, 0]])


def _grid(surfaces: Sequence[Surface]) -> Floats:
    """Values of surfaces over the same axes: float64[rows, columns, surfaces]."""
    return np.array([surface.values for surface in surfaces]).T.copy().reshape(-1, surfaces[0].columns, len(surfaces))


def _look_up(grid: Floats, row: int, column: int, across: float, along: float, out: Floats) -> Floats:
    """Bilinear interpolation behind a node."""
    corners = grid[row : row + 2, column : column + 2].reshape(4, -1)
    near, far = 1.0 - across, 1.0 - along
    return np.dot((near * far, near * along, across * far, across * along), corners, out=out)


def _stack(sides: Sequence[Sequence[Surface]]) -> tuple[Floats, Floats]:
    """All values one behind the other; where each surface begins: float64[2, splits]."""
    every = [surface for side in sides for surface in side]
    starts = np.cumsum([0, *(len(surface.values) for surface in every)])[:-1]
    return np.concatenate([np.array(surface.values) for surface in every]), starts.reshape(len(sides), -1)


def _axes(x: Sequence[float], z: Sequence[float]) -> Floats:
    """Something of both axes and both sides: float64[2, 2, 1]."""
    return np.array([x, z], dtype=np.float64)[:, :, None]
