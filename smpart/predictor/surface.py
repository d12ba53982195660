"""Values on a uniform grid, read by bilinear interpolation in a fraction of a microsecond."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Axis:
    """A uniform axis of a grid: nodes at ``start + step * i``."""

    start: float
    step: float
    count: int

    @classmethod
    def over(cls, low: float, high: float, step: float) -> Self:
        """From `low` to `high` or a little beyond; at least two nodes."""
        return cls(low, step, max(2, int(np.ceil((high - low) / step - 1e-9)) + 1))

    @property
    def nodes(self) -> Floats:
        """Where the nodes are: float64[count]."""
        nodes: Floats = self.start + self.step * np.arange(self.count, dtype=np.float64)
        return nodes


class Surface:
    """Values over two uniform axes, read by bilinear interpolation.

    Beyond the first axis values go on linearly, beyond the second they are held.

    Attributes:
        values: row by row: the second axis runs fastest.
        columns: nodes of the second axis.
        x, per_x, last_x: where the first axis begins, nodes a unit of it, and the last row that has another behind it.
        z, per_z, last_z: likewise the second axis, and its last node.

    >>> Surface(Axis(0.0, 1.0, 2), Axis(0.0, 1.0, 2), [0.0, 1.0, 2.0, 3.0]).at(0.5, 0.5)
    1.5
    """

    __slots__ = ("columns", "last_x", "last_z", "per_x", "per_z", "values", "x", "z")

    def __init__(self, x: Axis, z: Axis, values: Sequence[float]) -> None:
        self.x, self.per_x, self.last_x = x.start, 1.0 / x.step, x.count - 2
        self.z, self.per_z, self.last_z = z.start, 1.0 / z.step, z.count - 1
        self.columns = z.count
        self.values = values

    def at(self, x: float, z: float) -> float:
        """The value at a place."""
        x = (x - self.x) * self.per_x
        z = (z - self.z) * self.per_z
        row = int(x)
        if row > self.last_x:
            row = self.last_x
        elif row < 0:
            row = 0
        if z <= 0.0:
            column, z = 0, 0.0
        elif z >= self.last_z:
            column, z = self.last_z - 1, 1.0
        else:
            column = int(z)
            z -= column
        values, columns = self.values, self.columns
        place = row * columns + column
        low, high = values[place], values[place + columns]
        low += z * (values[place + 1] - low)
        high += z * (values[place + columns + 1] - high)
        return low + (x - row) * (high - low)

    def cell(self, x: float, z: float) -> tuple[int, int, float, float]:
        """Row and column of the node that a place lies behind, and how far behind it on both axes, in steps."""
        x = (x - self.x) * self.per_x
        z = min(max(0.0, (z - self.z) * self.per_z), self.last_z)
        row, column = max(0, min(int(x), self.last_x)), min(int(z), self.last_z - 1)
        return row, column, x - row, z - column

    def blend(self, other: Surface, share: float) -> Surface:
        """A surface between this one (0) and another over the same axes (1)."""
        made = copy.copy(self)
        pairs = zip(self.values, other.values, strict=True)
        made.values = [mine + share * (theirs - mine) for mine, theirs in pairs]
        return made

    def nearest(self, x: float, z: float) -> float:
        """The value of the nearest node."""
        row = min(max(0, round((x - self.x) * self.per_x)), self.last_x + 1)
        column = min(max(0, round((z - self.z) * self.per_z)), self.last_z)
        return self.values[row * self.columns + column]
