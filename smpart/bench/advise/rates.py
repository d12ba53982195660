"""Rates tried on one bench: each once, whoever asks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from smpart.bench.bench import Task
from smpart.bench.capacity import Trial, search
from smpart.bench.crew import Crew
from smpart.bench.metrics import attainment, backlog_grows
from smpart.bench.run import Run

TOLERANCE = 0.03
"""A capacity is found within this share."""

_STRIDE = 1.25


class Rates:
    """Capacities of policies on a crew's bench, seed by seed.

    Args:
        target: share of requests that must meet every objective.
    """

    def __init__(self, crew: Crew, target: float) -> None:
        self._crew, self._target = crew, target
        self._tried: dict[Task, Trial] = {}

    def attempt(self, policies: Sequence[str], rate: float, seed: int) -> dict[str, Trial]:
        """Try several policies at one rate."""
        tasks = [Task(policy, rate, seed) for policy in policies]
        fresh = [task for task in tasks if task not in self._tried]
        for task, made in zip(fresh, self._crew.runs(fresh), strict=True):
            self._tried[task] = Trial(rate, attainment(made.replay, made.slo), backlog_grows(made.replay))
        return {task.policy: self._tried[task] for task in tasks}

    @property
    def runs(self) -> int:
        """How many were made."""
        return len(self._tried)

    def capacity(self, policy: str, seed: int, guess: float) -> float:
        """The highest rate that held; 0: none did."""

        def attempt(rate: float) -> Trial:
            return self.attempt([policy], rate, seed)[policy]

        return search(attempt, guess, target=self._target, tolerance=TOLERANCE, stride=_STRIDE).rate

    def capacities(self, searches: Sequence[tuple[str, int, float]]) -> Iterator[float]:
        """`capacity` of each (policy, seed, guess), in their order, several at once if the crew makes several runs."""
        if self._crew.parallel == 1:
            yield from (self.capacity(*each) for each in searches)
            return
        with ThreadPoolExecutor(len(searches)) as threads:
            yield from threads.map(lambda each: self.capacity(*each), searches)

    def run(self, policy: str, rate: float, seed: int) -> Run:
        """One run, with everything that happened in it."""
        (made,) = self._crew.runs([Task(policy, rate, seed)])
        return made
