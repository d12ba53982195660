"""Lanes that are two threads of this process."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterable
from typing import Any

from smpart.partition.backend import Placement
from smpart.partition.device import Device
from smpart.partition.inflight import Inflight
from smpart.partition.lanes import Body, BodyFactory
from smpart.partition.split import Side, Split, nested
from smpart.partition.work import Completion, LaneFault, Work

logger = logging.getLogger(__name__)


class ThreadLanes:
    """`Lanes` in real time, each an OS thread with a body of its own.

    Both share the interpreter lock, so a body should spend its time outside it; on a CPU, processes isolate the
    lanes better.

    Args:
        factory: makes a lane's body, on the lane's thread.
        placement: moves a lane's threads to its side of a split.

    Raises:
        Exception: whatever `factory` raised; both threads have ended then.
    """

    depth = 2
    epoch = 0

    def __init__(self, device: Device, splits: Iterable[Split], factory: BodyFactory, placement: Placement) -> None:
        self.device = device
        self._splits = tuple(splits)
        self._placement = placement
        self._inflight = Inflight(self._splits, self.depth)
        self._changed = threading.Condition()
        self._queues: dict[Side, deque[Work]] = {side: deque() for side in Side}
        self._placed: dict[Side, Split] = {}
        self._done: list[Completion] = []
        self._woken = False
        self._closed = False
        self._ready = 0
        self._failure: BaseException | None = None
        self._threads = [
            threading.Thread(target=self._serve, args=(side, factory), name=f"smpart-{side}", daemon=True)
            for side in Side
        ]
        for thread in self._threads:
            thread.start()
        with self._changed:
            self._changed.wait_for(lambda: self._ready == len(self._threads) or self._failure is not None)
        if self._failure is not None:
            self.close()
            raise self._failure

    def body(self, side: Side, split: Split) -> Side:
        """One a side, for life."""
        return side

    def splits(self) -> tuple[Split, ...]:
        """Every split that can be realised."""
        return self._splits

    def overlapping(self) -> tuple[Split, ...]:
        """None."""
        return ()

    def disjoint(self, prefill: Split, decode: Split) -> bool:
        """Whether two sides under these splits may run at once: units have fixed positions."""
        return nested(prefill, decode)

    def now(self) -> float:
        """`time.monotonic`."""
        return time.monotonic()

    def launch(self, work: Work) -> None:
        """Queue one work. Raises `UsageError` (see `Inflight.add`) or, after `close`, `EngineClosed`."""
        with self._changed:
            self._inflight.add(work)
            self._queues[work.side].append(work)
            self._changed.notify_all()

    def wait(self, until: float | None) -> list[Completion]:
        """Block until a completion, a `wake`, `close`, or `until`; all completions so far."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._done or self._woken or self._closed,
                None if until is None else max(0.0, until - time.monotonic()),
            )
            self._woken = False
            done, self._done = self._done, []
            return done

    def wake(self) -> None:
        """End a `wait` in another thread, now or the next one."""
        with self._changed:
            self._woken = True
            self._changed.notify_all()

    def realised(self, side: Side) -> frozenset[int]:
        """Unit ids the lane's threads are on, read back; empty before its first work."""
        return self._placement.realised(side)

    def close(self) -> None:
        """Drop queued work, let what runs finish, end both threads. Idempotent."""
        with self._changed:
            self._closed = True
            self._inflight.close()
            for queue in self._queues.values():
                queue.clear()
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _serve(self, side: Side, factory: BodyFactory) -> None:
        """A lane's thread, from its first moment to its last."""
        try:
            body = factory(side)
        except BaseException as error:
            with self._changed:
                self._failure = error
                self._changed.notify_all()
            return
        with self._changed:
            self._ready += 1
            self._changed.notify_all()
        while (work := self._next(side)) is not None:
            completion = self._run(body, work)
            with self._changed:
                self._inflight.remove(work)
                self._done.append(completion)
                self._changed.notify_all()
        try:
            body.close()
        except Exception:
            logger.exception("%s lane: its body did not close", side)

    def _next(self, side: Side) -> Work | None:
        """The lane's next work; None once the lanes are closed."""
        queue = self._queues[side]
        with self._changed:
            self._changed.wait_for(lambda: queue or self._closed)
            return queue.popleft() if queue else None

    def _run(self, body: Body, work: Work) -> Completion:
        started = time.monotonic()
        result: Any = None
        fault: LaneFault | None = None
        try:
            if self._placed.pop(work.side, None) != work.split:
                self._placement.place(work.side, work.split)
            self._placed[work.side] = work.split
            result = body.run(work.payload)
        except BaseException as error:
            logger.exception("%s lane: work %d failed", work.side, work.id)
            fault = LaneFault(f"{type(error).__name__}: {error}", lost=False)
        return Completion(work, started, time.monotonic(), result, fault)
