"""Ratios of capacity, and when they are enough to advise a split."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import NamedTuple, Self

MARGIN = 0.05
"""A split must gain more than this at every contention constant and on every seed: two capacities that are each known
within 3 % may differ by so much for no reason."""

Capacities = Mapping[str, Sequence[float]]
"""Requests a second, by contender, one a seed; 0: none held."""

SPLIT, SHARE = "split", "do not split"


class Gain(NamedTuple):
    """A ratio of capacities over all contention constants and seeds."""

    low: float
    median: float
    high: float

    @classmethod
    def over(cls, ratios: Iterable[float]) -> Self:
        """From each ratio.

        >>> Gain.over([1.2, 1.0, 1.1])
        Gain(low=1.0, median=1.1, high=1.2)
        """
        all_of = sorted(ratios)
        return cls(all_of[0], median(all_of), all_of[-1])

    def __str__(self) -> str:
        return (
            f"{self.median:.2f}x"
            if self.low == self.high
            else f"{self.median:.2f}x ({self.low:.2f} to {self.high:.2f})"
        )


def gain(held: Mapping[float, Capacities], contender: str, base: Sequence[float]) -> Gain | None:
    """A contender's capacities, by contention constant, over those of another, seed by seed.

    None where the other held no rate on some seed: there is no ratio then.
    """
    if not all(base):
        return None
    return Gain.over(
        mine / theirs for by_name in held.values() for mine, theirs in zip(by_name[contender], base, strict=True)
    )


def verdict(held: Mapping[float, Capacities], contender: str, base: Sequence[float]) -> str:
    """`SPLIT` if the contender gains more than `MARGIN` everywhere, or always holds a rate where the other does not.

    >>> verdict({1.0: {"smpart": [3.0]}, 1.3: {"smpart": [2.2]}}, "smpart", [2.0])
    'split'
    >>> verdict({1.0: {"smpart": [3.0]}, 1.3: {"smpart": [2.0]}}, "smpart", [2.0])
    'do not split'
    """
    pairs = [(m, b) for by_name in held.values() for m, b in zip(by_name[contender], base, strict=True)]
    return SPLIT if all(mine > (1.0 + MARGIN) * other for mine, other in pairs) else SHARE
