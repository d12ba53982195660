"""Measured attention as a function: curves over total size, one for each length or batch, blended in between."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping

from smpart.sim.grid import Curve


class Sheaf:
    """Times over (key, total): a curve over `total` for each key, linear in the key at equal totals.

    Prefill attention at a given number of tokens is affine in the prompts' length, decode attention at a given number
    of KV tokens nearly constant in the batch; so the blend holds between measured keys, and no grid need be complete.
    Beyond the ends of the keys the last two go on, above; the first stands, below.
    """

    __slots__ = ("_curves", "_keys")

    def __init__(self, curves: Mapping[float, Mapping[float, float]]) -> None:
        self._keys = sorted(curves)
        self._curves: list[Curve] = [Curve(curves[key]) for key in self._keys]

    def __call__(self, key: float, total: float) -> float:
        """The value at a place."""
        keys, curves = self._keys, self._curves
        low = bisect_right(keys, key) - 1
        if low < 0 or len(keys) == 1:
            return curves[0](total)
        low = min(low, len(keys) - 2)
        first = curves[low](total)
        part = (key - keys[low]) / (keys[low + 1] - keys[low])
        if part == 0.0:
            return first
        return max(first + part * (curves[low + 1](total) - first), 0.5 * first)
