"""Who makes the runs at every contention constant: the same few processes for all, since opening one takes seconds."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import get_context

from smpart.bench.bench import Bench, Task
from smpart.bench.crew import Alone, Crew, Recipe
from smpart.bench.run import Run
from smpart.errors import SmpartError
from smpart.partition.cpu import Cpus


class Processes:
    """A `Crew` for one recipe, on processes that serve others too."""

    def __init__(self, pool: Executor, parallel: int, recipe: Recipe) -> None:
        self.parallel = parallel
        self._pool, self._recipe = pool, recipe

    def runs(self, tasks: Iterable[Task]) -> Iterator[Run]:
        """All are begun at once. Raises `SmpartError` if a process dies."""
        pending = [self._pool.submit(_run, self._recipe.backend, task) for task in tasks]
        try:
            yield from map(_result, pending)
        finally:
            for each in pending:
                each.cancel()


@contextmanager
def fleet(recipes: Sequence[Recipe], jobs: int) -> Iterator[Mapping[str, Crew]]:
    """A crew for each recipe, by its backend: `jobs` processes (0: one a core), or this one."""
    jobs = jobs or len(Cpus.usable().cores)
    if jobs == 1:
        yield {recipe.backend: Alone(recipe.open(), _quiet) for recipe in recipes}
        return
    context = get_context("forkserver" if os.name == "posix" else "spawn")
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=_know, initargs=(tuple(recipes),)) as pool:
        try:
            yield {recipe.backend: Processes(pool, jobs, recipe) for recipe in recipes}
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _result(future: Future[Run]) -> Run:
    try:
        return future.result()
    except BrokenProcessPool:
        raise SmpartError("a process of advise died; --jobs 1 makes all runs in one process") from None


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
