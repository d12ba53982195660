"""Who makes the runs of a bench: this process, one after the other, or, where time is virtual, several processes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from smpart.bench.bench import Bench, Chosen, Options, Task, unwatched
from smpart.bench.metrics import attainment
from smpart.bench.pool import Pool, in_order, processes
from smpart.bench.run import Run
from smpart.engine.deployment import Deployment
from smpart.kvcache import KVConfig
from smpart.partition.cpu import Cpus


class Crew(Protocol):
    """Makes runs."""

    parallel: int
    """Runs that are made at once."""

    def runs(self, tasks: Iterable[Task]) -> Iterator[Run]:
        """The runs of all tasks, in their order. May be called from several threads if `parallel` is above 1."""

    def abandon(self) -> None:
        """End what is being run, so that nobody waits for it any longer; nothing can be run afterwards."""


class Alone:
    """One run after the other, here.

    Args:
        say: told about each run as it ends.
    """

    parallel = 1

    def __init__(self, bench: Bench, say: Callable[[str], None]) -> None:
        self._bench, self._say = bench, say

    def runs(self, tasks: Iterable[Task]) -> Iterator[Run]:
        """Lazily: each run is made when it is asked for."""
        for task in tasks:
            done = self._bench.run(task)
            self._say(told(done))
            yield done

    def abandon(self) -> None:
        """Whoever could call this is who runs."""


@dataclass(frozen=True)
class Recipe:
    """What another process needs to set the same bench up. Nothing is measured a second time."""

    model: str
    backend: str
    dtype: str
    kv: KVConfig
    profile: str
    options: Options
    chosen: Chosen

    @classmethod
    def of(cls, bench: Bench) -> Recipe:
        """That of a bench in virtual time."""
        made = bench.deployment
        profile = "none" if made.profile is None else str(made.profile.source)
        return cls(made.name, made.backend, made.dtype, made.kv, profile, bench.options, bench.chosen)

    def open(self) -> Bench:
        """The bench, on a deployment of its own."""
        made = Deployment.open(self.model, backend=self.backend, dtype=self.dtype, kv=self.kv, profile=self.profile)
        return Bench(made, self.options, lambda line: None, unwatched, self.chosen)


class Processes:
    """Several processes, each with a virtual deployment of its own. The runs are those that `Alone` would make.

    Args:
        say: told about each run as it ends.
    """

    def __init__(self, pool: Pool, parallel: int, say: Callable[[str], None]) -> None:
        self.parallel = parallel
        self._pool, self._say = pool, say

    def runs(self, tasks: Iterable[Task]) -> Iterator[Run]:
        """All are begun at once. Raises `SmpartError` if a process dies."""
        for done in in_order(self._pool, _run, ((task,) for task in tasks), "the bench"):
            self._say(told(done))
            yield done

    def abandon(self) -> None:
        """End all processes at once."""
        self._pool.abandon()


@contextmanager
def crew(bench: Bench, say: Callable[[str], None]) -> Iterator[Crew]:
    """As many processes as the bench's options and the machine allow; none where time is real."""
    options = bench.options
    tasks = len(options.policies) * options.repeat * (1 if options.capacity else len(bench.chosen.rates))
    jobs = options.jobs or min(tasks, len(Cpus.usable().cores))
    if not bench.deployment.virtual or jobs == 1:
        yield Alone(bench, say)
        return
    with processes(jobs, _open, Recipe.of(bench)) as pool:
        yield Processes(pool, jobs, say)


_mine: list[Bench] = []
"""The bench of a process of the pool."""


def _open(recipe: Recipe) -> None:
    _mine[:] = [recipe.open()]


def _run(task: Task) -> Run:
    return _mine[0].run(task)


def told(run: Run) -> str:
    """One line on what came of a run."""
    record, met = run.record, attainment(run.replay, run.slo)
    at = "" if record["rate"] is None else f" at {record['rate']:.4g} req/s"
    return (
        f"{run.policy}{at}, seed {run.seed}: {len(run.replay.served)} requests in {run.replay.seconds:.3g} s, "
        f"{met:.0%} met the SLO"
    )
