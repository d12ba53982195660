"""Measured attention as a function: curves over total size, one for each length or batch, blended in between."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping

from smpart.sim.grid import Curve

_LEAST = 0.5
"""Share of the nearer curve's value that a blend never falls below, however far it goes on beyond the last key."""


class Sheaf:
    """Times over (key, total): a curve over `total` for each key, linear in the key at equal totals.

    Prefill attention at a given number of tokens is affine in the prompts' length, decode attention at a given number
    of KV tokens nearly constant in the batch; so the blend holds between measured keys, and no grid need be complete.
    Beyond the ends of the keys the last two go on, above; the first stands, below.
    """

    __slots__ = ("_along", "_curves", "_keys")

    def __init__(self, curves: Mapping[float, Mapping[float, float]]) -> None:
        self._keys = sorted(curves)
        self._curves: list[Curve] = [Curve(curves[key]) for key in self._keys]
        self._along: dict[float, Curve] = {}

    def __call__(self, key: float, total: float) -> float:
        """The value at a place."""
        first, second, part = self._around(key)
        low = first(total)
        return low if part == 0.0 else max(low + part * (second(total) - low), _LEAST * low)

    def along(self, key: float) -> Curve:
        """The same as one curve over `total`, up to twice the last one, which is kept: for keys that recur."""
        curve = self._along.get(key)
        if curve is None:
            curve = self._along[key] = self._blend(key)
        return curve

    def _around(self, key: float) -> tuple[Curve, Curve, float]:
        keys, curves = self._keys, self._curves
        low = bisect_right(keys, key) - 1
        if low < 0 or len(keys) == 1:
            return curves[0], curves[0], 0.0
        if low > len(keys) - 2:
            low = len(keys) - 2
        return curves[low], curves[low + 1], (key - keys[low]) / (keys[low + 1] - keys[low])

    def _blend(self, key: float) -> Curve:
        first, second, part = self._around(key)
        if part == 0.0:
            return first
        nodes = sorted({*first.nodes, *second.nodes})
        nodes.append(2.0 * nodes[-1] + 1.0)
        # Where the floor begins to hold, or ends, the curve bends between nodes: there it gets one more.
        over = [second(x) * part + first(x) * (1.0 - part - _LEAST) for x in nodes]
        steps = zip(nodes, nodes[1:], over, over[1:], strict=False)
        bends = [x0 + (x1 - x0) * a / (a - b) for x0, x1, a, b in steps if a * b < 0.0]
        return Curve({x: self(key, x) for x in (*nodes, *bends)})
