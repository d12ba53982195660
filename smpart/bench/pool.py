"""Processes that share what can be computed apart, each prepared once. They end with the one that began them."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import forkserver, get_context
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from smpart.errors import SmpartError

A = TypeVar("A")
T = TypeVar("T")


class Pool(ProcessPoolExecutor):
    """So many processes, each of which calls `prepare` first. They end with this process, however it dies.

    No future of theirs is ever cancelled: a pool that breaks while one is never ends the others (CPython 3.11).
    """

    def __init__(self, count: int, prepare: Callable[..., None] | None, arguments: tuple[Any, ...]) -> None:
        posix = os.name == "posix"
        if posix:
            _serve_deaf()
        context = get_context("forkserver" if posix else "spawn")
        far, self._leash = context.Pipe(
            duplex=False
        )  # nobody else holds the near end: that it is closed is seen by all
        super().__init__(count, mp_context=context, initializer=_begin, initargs=(far, prepare, arguments))

    def abandon(self) -> None:
        """End all processes at once, whatever they are at; who waits for them gets `BrokenProcessPool`."""
        self._leash.close()


@contextmanager
def processes(count: int, prepare: Callable[..., None] | None = None, *arguments: Any) -> Iterator[Pool]:
    """A `Pool`, whose processes end at once when an error leaves."""
    with Pool(count, prepare, arguments) as pool:
        try:
            yield pool
        except BaseException:
            pool.abandon()
            raise


@contextmanager
def threads(count: int, abandon: Callable[[], None]) -> Iterator[Executor]:
    """So many threads that wait for processes. When an error leaves, `abandon` ends those first, and so the threads."""
    with ThreadPoolExecutor(count) as made:
        try:
            yield made
        except BaseException:
            made.shutdown(wait=False, cancel_futures=True)
            abandon()
            raise


def _serve_deaf() -> None:
    """Start the fork server with Ctrl-C blocked, as all its children then have it from their first moment.

    A terminal sends Ctrl-C to them all. It is for their parent to hear; with that, they end without a word.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _begin(leash: Connection, prepare: Callable[..., None] | None, arguments: tuple[Any, ...]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # where somebody else started the fork server
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
    try:
        for each in [pool.submit(call, *arguments) for arguments in argument_lists]:
            yield each.result()
    except BrokenProcessPool:
        raise SmpartError(f"a process of {whose} died; --jobs 1 makes all runs in one process") from None


def as_done(pool: Executor, call: Callable[[A], T], arguments: Iterable[A]) -> Iterator[tuple[A, T]]:
    """Each argument with what `call` gives for it, in the order in which they end. Raises what `call` raises.

    Raises:
        SmpartError: a process dies, or did before.
    """
    try:
        pending = {pool.submit(call, argument): argument for argument in arguments}
        for each in as_completed(pending):
            yield pending[each], each.result()
    except BrokenProcessPool:
        raise SmpartError("a process of the pool died (for want of memory?): run it again with fewer --jobs") from None
