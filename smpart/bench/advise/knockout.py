"""The best of several policies at the least cost: those that fail at a rate are not run at higher ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from smpart.bench.capacity import Trial

_CLOSE = 1.1
"""Survivors whose capacities lie between two rates so near are told apart by attainment."""


class Winner(NamedTuple):
    """Who is left, and the highest rate at which somebody held (if nobody did: the lowest that was tried)."""

    name: str
    rate: float


def knockout(
    names: Sequence[str],
    attempt: Callable[[Sequence[str], float], Mapping[str, Trial]],
    guess: float,
    *,
    target: float,
    most: int = 12,
) -> Winner:
    """Doubling, then bisection of the logarithm of the rate, with fewer names each time some of them hold.

    Args:
        attempt: tries several at one rate.
        guess: where to start, requests per second.
        target: attainment that must be reached.
        most: rates at most.

    >>> true = {"a": 3.0, "b": 5.0, "c": 4.0}
    >>> def attempt(names, rate): return {name: Trial(rate, float(true[name] >= rate), False) for name in names}
    >>> knockout("abc", attempt, 1.0, target=0.9).name
    'b'
    """
    left = list(names)
    low, high, rate = 0.0, math.inf, guess
    trials: Mapping[str, Trial] = {}
    for _ in range(most):
        trials = attempt(left, rate)
        if holding := [name for name in left if trials[name].holds(target)]:
            left, low = holding, rate
        else:
            high = rate
        if low and (len(left) == 1 or high <= low * _CLOSE):
            break
        rate = 2.0 * low if math.isinf(high) else high / 2.0 if low == 0.0 else math.sqrt(low * high)
    best = max(left, key=lambda name: (not trials[name].grows, trials[name].attainment))
    return Winner(best, low or rate)
