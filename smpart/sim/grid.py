"""Tables of measurements as functions: multilinear between their nodes."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import product


class Grid:
    """A complete grid of values over one or more axes, linear along each axis between nodes.

    Times of kernels are close to affine in tokens, sequences and lengths, and a product such as batch times length is
    reproduced exactly. Beyond the last node of an axis the last cell goes on; below the first one its value stands.

    Args:
        axes: rising nodes of each axis, at least one each.
        values: one a node, by coordinates.

    Raises:
        KeyError: a node without a value.

    >>> area = Grid([[1, 2, 4], [10, 20]], {(x, y): x * y for x in (1, 2, 4) for y in (10, 20)})
    >>> area(3, 15), area(8, 20), area(0.5, 10)
    (45.0, 160.0, 10.0)
    """

    __slots__ = ("_axes", "_values")

    def __init__(self, axes: Sequence[Sequence[float]], values: Mapping[tuple[float, ...], float]) -> None:
        self._values = [float(values[node]) for node in product(*axes)]
        stride = len(self._values)
        self._axes: list[tuple[list[float], int, int]] = []  # nodes, number of the last one, values a node apart
        for axis in axes:
            stride //= len(axis)
            self._axes.append((list(axis), len(axis) - 1, stride))

    def __call__(self, *at: float) -> float:
        """The value at a place, one coordinate an axis."""
        base, inside = 0, []
        for x, (axis, last, stride) in zip(at, self._axes, strict=True):
            low = bisect_right(axis, x) - 1
            if low < 0 or last == 0:
                continue
            if low >= last:
                low = last - 1
            base += low * stride
            if x != axis[low]:
                inside.append((stride, (x - axis[low]) / (axis[low + 1] - axis[low])))
        places = [base]
        for stride, _ in inside:
            places += [place + stride for place in places]
        corners = [self._values[place] for place in places]
        for _, part in reversed(inside):
            half = len(corners) // 2
            corners = [a + part * (b - a) for a, b in zip(corners[:half], corners[half:], strict=True)]
        return corners[0]


class Curve:
    """Values over one axis: a `Grid` of one dimension, quicker.

    Args:
        points: value by place, at least one.

    Attributes:
        nodes: rising places.

    >>> Curve({1: 2.0, 3: 6.0})(2), Curve({1: 2.0, 3: 6.0})(4), Curve({1: 2.0, 3: 6.0})(0)
    (4.0, 8.0, 2.0)
    """

    __slots__ = ("_last", "_slopes", "_values", "nodes")

    def __init__(self, points: Mapping[float, float]) -> None:
        self.nodes = [float(x) for x in sorted(points)]
        self._values = [float(points[x]) for x in sorted(points)]
        pairs = zip(self.nodes, self.nodes[1:], self._values, self._values[1:], strict=False)
        self._slopes = [(high - low) / (x1 - x0) for x0, x1, low, high in pairs]
        self._last = len(self._slopes) - 1

    def __call__(self, x: float) -> float:
        """The value at a place."""
        place = bisect_right(self.nodes, x) - 1
        if place > self._last:
            place = self._last
        if place < 0:
            return self._values[0]
        return self._values[place] + self._slopes[place] * (x - self.nodes[place])
