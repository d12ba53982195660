"""Rates tried on one bench: each once, whoever asks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from smpart.bench.bench import Task
from smpart.bench.capacity import Care, Trial, search
from smpart.bench.crew import Crew
from smpart.bench.metrics import attainment, backlog_grows
from smpart.bench.pool import threads
from smpart.bench.run import Run

TOLERANCE = 0.03
"""A capacity is found within this share."""

_STRIDE = 1.25

LEAST = 0.2
"""Share of chunked's rate below which it does not matter what another holds: low rates take long to simulate."""


class Search(NamedTuple):
    """A capacity to find: on which seed, where to start, and below which rate it counts as none."""

    policy: str
    seed: int
    guess: float
    least: float = 0.0


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

    def capacity(self, asked: Search) -> float:
        """The highest rate that held; 0: none did."""

        def attempt(rate: float) -> Trial:
            return self.attempt([asked.policy], rate, asked.seed)[asked.policy]

        return search(attempt, asked.guess, Care(TOLERANCE, _STRIDE, asked.least), target=self._target).rate

    def capacities(self, searches: Sequence[Search]) -> Iterator[float]:
        """`capacity` of each, in their order, several at once if the crew makes several runs at once."""
        if self._crew.parallel == 1:
            yield from map(self.capacity, searches)
            return
        with threads(len(searches), self._crew.abandon) as several:
            yield from several.map(self.capacity, searches)

    def run(self, policy: str, rate: float, seed: int) -> Run:
        """One run, with everything that happened in it."""
        (made,) = self._crew.runs([Task(policy, rate, seed)])
        return made
