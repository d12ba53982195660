"""Capacity: the highest rate at which enough requests meet every objective and the queue does not grow."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from statistics import fmean
from typing import cast

from smpart.bench.bench import Bench, Task
from smpart.bench.crew import Crew
from smpart.bench.metrics import attainment, backlog_grows
from smpart.bench.pool import threads
from smpart.bench.run import Run

TARGET = 0.9
"""Share of requests that must meet every objective, unless said otherwise."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One rate, tried on every seed.

    Attributes:
        attainment: mean share of requests that met every objective.
        grows: whether the queue grew for most seeds.
        cut: a replay was cut short because the rate had failed: the attainment is an upper bound, and what `grows` says
            of the queue is not known.
    """

    rate: float
    attainment: float
    grows: bool
    cut: bool = False

    def holds(self, target: float) -> bool:
        """Whether this rate is within capacity."""
        return self.attainment >= target and not self.grows


@dataclass(frozen=True, slots=True)
class Capacity:
    """What a search found: the highest rate that held (0 if none did), and all trials in the order they were made."""

    rate: float
    trials: tuple[Trial, ...]

    @property
    def open(self) -> bool:
        """Whether the search ended before any rate failed: then the capacity may be far higher."""
        return self.rate > 0.0 and self.rate == max(trial.rate for trial in self.trials)


@dataclass(frozen=True, slots=True)
class Care:
    """How a search goes about it.

    Attributes:
        tolerance: it ends when the lowest rate that failed is within this share of the highest that held.
        stride: first factor from rate to rate until one held and one failed, small where the guess is good; it grows
            to 2.
        least: lower rates are not tried.
    """

    tolerance: float = 0.05
    stride: float = 2.0
    least: float = 0.0


def search(
    attempt: Callable[[float], Trial],
    guess: float,
    care: Care = Care(),
    *,
    target: float = TARGET,
    most: int = 16,
) -> Capacity:
    """Doubling, then bisection of the logarithm of the rate.

    Args:
        attempt: tries one rate (on the same seeds each time, so that rates and policies are paired).
        guess: where to start, requests per second.
        target: attainment that must be reached.
        most: trials at most.
    """
    trials: list[Trial] = []
    low, high, rate, stride = 0.0, math.inf, guess, care.stride
    while len(trials) < most and high > low * (1.0 + care.tolerance) and rate >= care.least and rate > 0.0:
        trials.append(attempt(rate))
        if trials[-1].holds(target):
            low = rate
        else:
            high = rate
        if math.isinf(high):
            rate = stride * low
        elif low == 0.0:
            rate = max(high / stride, care.least) if high > care.least else 0.0
        else:
            rate = math.sqrt(low * high)
        stride = min(2.0, stride * stride)
    return Capacity(low, tuple(trials))


def hopeless_below(target: float, seeds: int) -> float:
    """The attainment of one seed below which the mean cannot reach `target`, were all others perfect; 0: there is none.

    >>> hopeless_below(0.9, 1), hopeless_below(0.9, 3), hopeless_below(0.9, 10)
    (0.9, 0.7, 0.0)
    """
    return max(0.0, round(1.0 - seeds * (1.0 - target), 9))


def at_capacity(bench: Bench, crew: Crew, say: Callable[[str], None], care: Care = Care()) -> Iterator[Run]:
    """Each policy's run at its capacity (the first target's; at the lowest rate tried if none held).

    Several policies are searched at once if the crew makes several runs at once.
    """
    policies = bench.options.policies
    if crew.parallel == 1:
        yield from (_at_capacity(bench, crew, say, policy, care) for policy in policies)
        return
    with threads(len(policies), crew.abandon) as several:
        yield from several.map(lambda policy: _at_capacity(bench, crew, say, policy, care), policies)


def _at_capacity(bench: Bench, crew: Crew, say: Callable[[str], None], policy: str, care: Care) -> Run:
    options, trials, held = bench.options, dict[float, Trial](), dict[float, Run]()
    seeds = range(options.source.seed, options.source.seed + options.repeat)
    targets = options.attainment or (TARGET,)
    least = hopeless_below(min(targets), len(seeds))

    def attempt(rate: float) -> Trial:
        if rate not in trials:
            shares, growing, cut = [], 0, False
            runs = list(crew.runs([Task(policy, rate, seed, least) for seed in seeds]))
            for made in runs:
                shares.append(attainment(made.replay, made.slo))
                growing += backlog_grows(made.replay)
                cut |= made.replay.reachable is not None
            trials[rate] = trial = Trial(rate, fmean(shares), 2 * growing > len(shares), cut)
            if trial.holds(targets[0]) and rate > max(held, default=0.0):
                held.clear()  # only the highest rate that holds is asked for in the end
                held[rate] = runs[0]
            queue = "the queue grows" if trial.grows else "the queue does not grow"
            said = f"at most {trial.attainment:.1%}, cut short" if trial.cut else f"{trial.attainment:.1%}, {queue}"
            say(f"{policy} at {rate:.4g} req/s: attainment {said}")
        return trials[rate]

    found: dict[float, float] = {}
    unbounded = []
    for target in targets:
        guess = next((rate for rate in found.values() if rate), bench.load.rate)
        capacity = search(attempt, guess, care, target=target)
        found[target] = capacity.rate
        if capacity.open:
            unbounded.append(target)
            say(f"{policy}: no rate tried failed: it holds {capacity.rate:.4g} req/s or more; try a higher --rate")
    rate = found[targets[0]]
    best = held.get(rate) or next(iter(crew.runs([Task(policy, rate or min(trials), seeds[0])])))
    tried = [_told(trial) for trial in trials.values()]
    capacities = {f"{target:g}": held for target, held in found.items()}
    per_gpu = rate / cast(int, best.record["gpus"])
    searched = {
        "capacity_rps": rate,
        "capacity_per_gpu_rps": per_gpu,
        "capacities": capacities,
        "or_more": [f"{target:g}" for target in unbounded],
        "trials": tried,
    }
    return replace(best, record={**best.record, **searched})


def _told(trial: Trial) -> dict[str, object]:
    """A trial in the record of a run."""
    grows = None if trial.cut else trial.grows
    return {"rate": trial.rate, "slo_attainment": trial.attainment, "queue_grows": grows, "cut": trial.cut}
