"""Two lanes in worker processes: on CPU cores one a lane (threads would share one interpreter lock), on a GPU one for
both, or under MPS one a share.

The engine's side never blocks except in `wait`. A worker that dies is replaced at once; what it had not finished
comes back as lost, and the other lane does not notice, unless memory that both need died with it.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from collections import deque
from collections.abc import Hashable, Mapping, Sequence

from smpart.errors import SmpartError
from smpart.partition.inflight import Inflight
from smpart.partition.split import Side, Split
from smpart.partition.work import Completion, Work
from smpart.runtime.channel import pack
from smpart.runtime.crew import Crew
from smpart.runtime.remote import RemoteWorker, gone
from smpart.runtime.segments import SharedSegment

_DEPTH = 2
_CLOSE_S = 2.0


class ProcessLanes:
    """`Lanes` over worker processes forked from the zygote. For one caller's thread, except `wake`.

    Works of one side run in launch order also where a new split means another worker: until the one before has
    finished all that it was sent for the side, the next work is held here. That costs the way there and back once a
    change.

    Args:
        crew: how the workers are made and spoken to.
        segments: shared memory, passed to them by name. Stays the caller's, and open while the lanes are.
        preload: modules of torch or transformers whose memory the workers should share.

    Raises:
        SmpartError: a worker cannot start.
    """

    depth = _DEPTH

    def __init__(
        self,
        crew: Crew,
        segments: Mapping[str, SharedSegment] | None = None,
        *,
        preload: Sequence[str] = (),
    ) -> None:
        self.device = crew.device
        self.epoch = 0
        self._crew = crew
        self._workers = [RemoteWorker(crew, seat, segments or {}, preload) for seat in range(len(crew.seats))]
        self._held: dict[Side, deque[tuple[Work, bytes]]] = {side: deque() for side in Side}
        self._sent: dict[Side, Work] = {}
        self._inflight = Inflight((), self.depth)
        self._wake_lock = threading.Lock()
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._open = True
        try:
            self._start()
            while not all(worker.ready for worker in self._workers):
                self._poll(None)
                self._pump()
        except BaseException:
            self.close()
            raise
        self._inflight = Inflight(crew.splits(), self.depth, crew.disjoint, crew.overlapping())

    def body(self, side: Side, split: Split) -> Hashable:
        """See `Lanes`: one a side in each worker, until what it was told is lost."""
        worker = self._worker(side, split)
        return side, worker.seat, worker.body

    def splits(self) -> tuple[Split, ...]:
        """Every split that can be realised, in order of `Split.prefill`."""
        return self._crew.splits()

    def overlapping(self) -> tuple[Split, ...]:
        """See `Lanes`."""
        return self._crew.overlapping()

    def disjoint(self, prefill: Split, decode: Split) -> bool:
        """See `Lanes`."""
        return self._crew.disjoint(prefill, decode)

    def now(self) -> float:
        """Seconds by `time.monotonic`, which all processes of a machine share."""
        return time.monotonic()

    def launch(self, work: Work) -> None:
        """Queue one work; never blocks. Raises `UsageError` (see `Inflight.add`) or, after `close`, `EngineClosed`."""
        self._inflight.add(work)
        try:
            self._held[work.side].append((work, pack(self._crew.message(work))))
        except BaseException:  # a payload that cannot be pickled
            self._inflight.remove(work)
            raise
        self._send(work.side)

    def wait(self, until: float | None) -> list[Completion]:
        """Block until a completion, a `wake`, or the clock reaches `until` (None: no limit); all completions so far.

        Returns at once when the lanes are closed.

        Raises:
            SmpartError: a worker keeps dying, or a replacement cannot start; the lanes are then closed.
        """
        while self._open:
            woken = self._poll(until)
            done = self._collect()
            if done or woken or (until is not None and self.now() >= until):
                return sorted(done, key=lambda completion: completion.finished)
        return []

    def wake(self) -> None:
        """End a `wait` in another thread, now or the next one. Safe from any thread, also after `close`."""
        with self._wake_lock:
            if self._open:
                os.eventfd_write(self._wake_fd, 1)

    def realised(self, side: Side) -> frozenset[int]:
        """Unit ids that the side is on, read back from the system."""
        return self._crew.realised(side, self.pid(side), self._sent.get(side))

    def pid(self, side: Side) -> int:
        """Process id of the worker that has the side's last work, or would have a first one."""
        last = self._sent.get(side)
        split = last.split if last is not None else next(s for s in self.splits() if s.units(side))
        return self._worker(side, split).pid

    def pids(self) -> tuple[int, ...]:
        """Process ids of all workers, in the order of the crew's seats."""
        return tuple(worker.pid for worker in self._workers)

    def close(self) -> None:
        """End the workers. Idle ones close their body first; unfinished work is dropped."""
        with self._wake_lock:
            if not self._open:
                return
            self._open = False
            os.close(self._wake_fd)
        self._inflight.close()
        followers = [worker for worker in self._workers if self._follows(worker)]
        self._end(followers)
        self._end([worker for worker in self._workers if worker not in followers])

    def _worker(self, side: Side, split: Split) -> RemoteWorker:
        return self._workers[self._crew.seat(side, split)]

    def _follows(self, worker: RemoteWorker) -> bool:
        return self._crew.seats[worker.seat].follows

    def _end(self, workers: Sequence[RemoteWorker]) -> None:
        workers = [worker for worker in workers if worker.up]
        for worker in workers:
            worker.ask_to_end()
        deadline = self.now() + _CLOSE_S
        for worker in workers:
            worker.end(deadline)

    def _start(self) -> None:
        """Start every worker that is not up and may be."""
        for worker in self._workers:
            if not worker.up and (self._workers[0].ready or not self._follows(worker)):
                worker.start()

    def _send(self, side: Side) -> None:
        """Send a side's held works, as long as their turn has come."""
        held, last = self._held[side], self._sent.get(side)
        before = self._worker(side, last.split) if last is not None else None
        while held:
            work, packed = held[0]
            worker = self._worker(side, work.split)
            if not worker.up or (before is not None and before is not worker and before.works_for(side)):
                return
            worker.launch(work, packed)
            held.popleft()
            self._sent[side] = work
            before = worker

    def _poll(self, until: float | None) -> bool:
        """Sleep until something happens or `until`; whether it was a wake."""
        poller = select.poll()
        poller.register(self._wake_fd, select.POLLIN)
        for worker in self._workers:
            if worker.up:
                worker.register(poller)
        timeout = None if until is None else max(0.0, until - self.now()) * 1e3
        ready = {fd for fd, _ in poller.poll(timeout)}
        if self._wake_fd not in ready:
            return False
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake_fd)
        return True

    def _collect(self) -> list[Completion]:
        done = self._pump()
        for completion in done:
            self._inflight.remove(completion.work)
        return done

    def _pump(self) -> list[Completion]:
        completions: list[Completion] = []
        try:
            for worker in self._workers:
                if worker.up:
                    done, code = worker.collect()
                    completions += done
                    if code is not None:
                        completions += self._bury(worker, code)
            self._start()
        except SmpartError:
            self.close()
            raise
        for side in Side:
            self._send(side)
        return completions

    def _bury(self, worker: RemoteWorker, code: int) -> list[Completion]:
        """What is lost with a worker that ended: its works and what is held behind them, or everything.

        Raises:
            SmpartError: it keeps ending.
        """
        lost = worker.bury(code)
        worker.count_death(code)
        sides = {completion.work.side for completion in lost}
        if self._crew.fatal(worker.seat, code):
            self.epoch += 1
            sides = set(Side)
            others = [other for other in self._workers if other.up]
            for other in others:
                other.kill()
            for other in others:
                lost += other.bury(other.join())
        for side in sides:
            while self._held[side]:
                work, _ = self._held[side].popleft()
                self._worker(side, work.split).body += 1  # it will never hear what this would have told it
                lost.append(gone(work, f"{worker.name} ended before its turn came"))
        return lost
