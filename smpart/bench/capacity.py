"""Capacity: the highest rate at which enough requests meet every objective and the queue does not grow."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Trial:
    """One rate, tried on every seed.

    Attributes:
        attainment: mean share of requests that met every objective.
        grows: whether the queue grew for most seeds.
    """

    rate: float
    attainment: float
    grows: bool

    def holds(self, target: float) -> bool:
        """Whether this rate is within capacity."""
        return self.attainment >= target and not self.grows


@dataclass(frozen=True, slots=True)
class Capacity:
    """What a search found: the highest rate that held (0 if none did), and all trials in the order they were made."""

    rate: float
    trials: tuple[Trial, ...]


def search(
    attempt: Callable[[float], Trial], guess: float, *, target: float = 0.9, tolerance: float = 0.05, most: int = 16
) -> Capacity:
    """Doubling, then bisection of the logarithm of the rate.

    Args:
        attempt: tries one rate (on the same seeds each time, so that rates and policies are paired).
        guess: where to start, requests per second.
        target: attainment that must be reached.
        tolerance: the search ends when the lowest rate that failed is within this share of the highest that held.
        most: trials at most.
    """
    trials: list[Trial] = []
    low, high, rate = 0.0, math.inf, guess
    while len(trials) < most and high > low * (1.0 + tolerance):
        trials.append(attempt(rate))
        if trials[-1].holds(target):
            low = rate
        else:
            high = rate
        rate = 2.0 * low if math.isinf(high) else high / 2.0 if low == 0.0 else math.sqrt(low * high)
    return Capacity(low, tuple(trials))
