"""Processes that share what can be computed apart, each prepared once."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import get_context
from typing import Any, TypeVar

from smpart.errors import SmpartError

T = TypeVar("T")


@contextmanager
def processes(count: int, prepare: Callable[..., None], *arguments: Any) -> Iterator[Executor]:
    """So many processes, each of which calls `prepare` first; what was not begun when an error leaves is dropped."""
    context = get_context("forkserver" if os.name == "posix" else "spawn")
    with ProcessPoolExecutor(count, mp_context=context, initializer=prepare, initargs=arguments) as pool:
        try:
            yield pool
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def in_order(
    pool: Executor, call: Callable[..., T], argument_lists: Iterable[tuple[Any, ...]], whose: str
) -> Iterator[T]:
    """What `call` gives for each list of arguments; all are begun at once.

    Args:
        whose: processes they are, for the message.

    Raises:
        SmpartError: a process dies, or did before.
    """
    pending = []
    try:
        pending += [pool.submit(call, *arguments) for arguments in argument_lists]
        for each in pending:
            yield each.result()
    except BrokenProcessPool:
        raise SmpartError(f"a process of {whose} died; --jobs 1 makes all runs in one process") from None
    finally:
        for each in pending:
            each.cancel()
