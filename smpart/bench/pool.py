"""Processes that share what can be computed apart, each prepared once. They end with the one that began them."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from smpart.errors import SmpartError

A = TypeVar("A")
T = TypeVar("T")


@contextmanager
def processes(count: int, prepare: Callable[..., None] | None = None, *arguments: Any) -> Iterator[Executor]:
    """So many processes, each of which calls `prepare` first.

    When an error leaves, they end at once, whatever they are at; likewise when this process dies, however it dies.
    """
    context = get_context("forkserver" if os.name == "posix" else "spawn")
    far, near = context.Pipe(duplex=False)  # nobody else holds the near end: that it is closed is seen by all
    begin = (far, prepare, arguments)
    with far, near, ProcessPoolExecutor(count, mp_context=context, initializer=_begin, initargs=begin) as pool:
        try:
            yield pool
        except BaseException:
            near.close()
            raise


def _begin(leash: Connection, prepare: Callable[..., None] | None, arguments: tuple[Any, ...]) -> None:
    threading.Thread(target=_end_with, args=(leash,), name="leash", daemon=True).start()
    if prepare is not None:
        prepare(*arguments)


def _end_with(leash: Connection) -> None:
    """A worker waits for its next work on a pipe that it holds open itself, and would wait for ever."""
    leash.poll(None)
    os._exit(1)


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


def as_done(pool: Executor, call: Callable[[A], T], arguments: Iterable[A]) -> Iterator[tuple[A, T]]:
    """Each argument with what `call` gives for it, in the order in which they end. Raises what `call` raises.

    Raises:
        SmpartError: a process dies, or did before.
    """
    pending = {}
    try:
        pending.update({pool.submit(call, argument): argument for argument in arguments})
        for each in as_completed(pending):
            yield pending[each], each.result()
    except BrokenProcessPool:
        raise SmpartError("a process of the pool died (for want of memory?): run it again with fewer --jobs") from None
    finally:
        for each in pending:
            each.cancel()
