"""Who makes the runs at every contention constant: the same few processes for all, since opening one takes seconds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from smpart.bench.bench import Bench, Task
from smpart.bench.crew import Alone, Crew, Recipe
from smpart.bench.pool import Pool, in_order, processes
from smpart.bench.run import Run
from smpart.partition.cpu import Cpus


class Processes:
    """A `Crew` for one recipe, on processes that serve others too."""

    def __init__(self, pool: Pool, parallel: int, recipe: Recipe) -> None:
        self.parallel = parallel
        self._pool, self._recipe = pool, recipe

    def runs(self, tasks: Iterable[Task]) -> Iterator[Run]:
        """All are begun at once. Raises `SmpartError` if a process dies."""
        yield from in_order(self._pool, _run, ((self._recipe.backend, task) for task in tasks), "advise")

    def abandon(self) -> None:
        """End all processes at once, those of other recipes, too."""
        self._pool.abandon()


@contextmanager
def fleet(recipes: Sequence[Recipe], jobs: int) -> Iterator[Mapping[str, Crew]]:
    """A crew for each recipe, by its backend: `jobs` processes (0: one a core), or this one."""
    jobs = jobs or len(Cpus.usable().cores)
    if jobs == 1:
        yield {recipe.backend: Alone(recipe.open(), _quiet) for recipe in recipes}
        return
    with processes(jobs, _know, tuple(recipes)) as pool:
        yield {recipe.backend: Processes(pool, jobs, recipe) for recipe in recipes}


_recipes: dict[str, Recipe] = {}
_benches: dict[str, Bench] = {}
"""Of a process of the pool, by backend; a bench is opened when its first task comes."""


def _know(recipes: Sequence[Recipe]) -> None:
    _recipes.update((recipe.backend, recipe) for recipe in recipes)


def _run(backend: str, task: Task) -> Run:
    if backend not in _benches:
        _benches[backend] = _recipes[backend].open()
    return _benches[backend].run(task)


def _quiet(line: str) -> None:
    """A search tells what it found; single runs are told nobody."""
