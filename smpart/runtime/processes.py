"""Two lanes in worker processes: on CPU cores one a lane (threads would share one interpreter lock), on a GPU one.

The engine's side never blocks except in `wait`. A worker that dies is replaced at once; what it had not finished
comes back as lost, and the other lane does not notice.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence

from smpart.errors import SmpartError
from smpart.partition.inflight import Inflight
from smpart.partition.split import Side, Split
from smpart.partition.work import Completion, LaneFault, Work
from smpart.runtime.channel import Channel
from smpart.runtime.children import Child, Zygote
from smpart.runtime.crew import Crew
from smpart.runtime.messages import Done, Ready
from smpart.runtime.segments import SharedSegment

logger = logging.getLogger(__name__)

_DEPTH = 2
_MOST_DEATHS = 5
_DEATHS_WINDOW_S = 60.0
_CLOSE_S = 2.0


class ProcessLanes:
    """`Lanes` over worker processes forked from the zygote. For one caller's thread, except `wake`.

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
        self._crew = crew
        self._workers: list[_Worker] = []
        self._inflight = Inflight((), self.depth)
        self._wake_lock = threading.Lock()
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._open = True
        try:
            for team in crew.teams:
                self._workers.append(_Worker(crew, team, segments or {}, preload))
            while not all(worker.ready for worker in self._workers):
                self._poll(None)
                self._pump()
        except BaseException:
            self.close()
            raise
        self._of = {side: worker for worker in self._workers for side in worker.sides}
        self._inflight = Inflight(crew.splits(), self.depth, crew.disjoint)

    @property
    def epoch(self) -> int:
        """See `Lanes`: on a device the KV memory dies with the process that holds it."""
        return sum(worker.deaths for worker in self._workers) if self._crew.forgets else 0

    def splits(self) -> tuple[Split, ...]:
        """Every split that can be realised, in order of `Split.prefill`."""
        return self._crew.splits()

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
            self._of[work.side].launch(work)
        except BaseException:  # a payload that cannot be pickled
            self._inflight.remove(work)
            raise

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
        worker = self._of[side]
        return self._crew.realised(side, worker.pid, worker.last.get(side))

    def pid(self, side: Side) -> int:
        """Process id of the side's worker."""
        return self._of[side].pid

    def close(self) -> None:
        """End the workers. Idle ones close their body first; unfinished work is dropped."""
        with self._wake_lock:
            if not self._open:
                return
            self._open = False
            os.close(self._wake_fd)
        self._inflight.close()
        for worker in self._workers:
            worker.ask_to_end()
        deadline = self.now() + _CLOSE_S
        for worker in self._workers:
            worker.end(deadline)

    def _poll(self, until: float | None) -> bool:
        """Sleep until something happens or `until`; whether it was a wake."""
        poller = select.poll()
        poller.register(self._wake_fd, select.POLLIN)
        for worker in self._workers:
            worker.register(poller)
        timeout = None if until is None else max(0.0, until - self.now()) * 1e3
        ready = {fd for fd, _ in poller.poll(timeout)}
        if self._wake_fd not in ready:
            return False
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake_fd)
        return True

    def _pump(self) -> list[Completion]:
        try:
            return [completion for worker in self._workers for completion in worker.collect()]
        except SmpartError:
            self.close()
            raise

    def _collect(self) -> list[Completion]:
        done = self._pump()
        for completion in done:
            self._inflight.remove(completion.work)
        return done


class _Worker:
    """A worker process, what it has in flight, and its replacement when it dies.

    Attributes:
        last: its last work of each side.
        deaths: how often it was replaced.
    """

    def __init__(
        self, crew: Crew, sides: tuple[Side, ...], segments: Mapping[str, SharedSegment], preload: Sequence[str]
    ) -> None:
        self.sides = sides
        self.pending: dict[int, Work] = {}
        self.last: dict[Side, Work] = {}
        self.ready = False
        self.deaths = 0
        self._crew = crew
        self._segments = segments
        self._preload = preload
        self._recent: deque[float] = deque(maxlen=_MOST_DEATHS)
        self._start()

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def _name(self) -> str:
        return f"the {self.sides[0]} lane's worker" if len(self.sides) == 1 else "the device's worker"

    def register(self, poller: select.poll) -> None:
        """Have a poller notice all that `collect` would see."""
        poller.register(self._channel, select.POLLIN | (select.POLLOUT if self._channel.unsent else 0))
        poller.register(self._child.fd, select.POLLIN)

    def launch(self, work: Work) -> None:
        self._channel.send(self._crew.message(work))
        self.pending[work.id] = work
        self.last[work.side] = work

    def collect(self) -> list[Completion]:
        """What has ended. A worker found dead is replaced, and its works are among it, as lost.

        Raises:
            SmpartError: it keeps dying, or cannot build its body.
        """
        # Ask about its end first: what the worker said before it died is then complete in the channel.
        code = self._child.join(0)
        done = [completion for message in self._channel.pump() for completion in self._understand(message)]
        if code is None and self._channel.closed:
            code = self._child.join(_CLOSE_S)
            if code is None:  # it hung up and yet lives: it must not touch the segments any more
                self._child.kill()
                code = self._child.join(None)
        return done if code is None else done + self._bury(code)

    def ask_to_end(self) -> None:
        """Hang up. An idle worker closes its body and ends; a busy one is killed."""
        if self.pending or not self.ready:
            self._child.kill()
        self._channel.close()

    def end(self, deadline: float) -> None:
        """See that the worker is gone, by `deadline` (seconds by `time.monotonic`) at the latest."""
        if self._child.join(max(0.0, deadline - time.monotonic())) is None:
            self._child.kill()
            self._child.join(None)
        self._child.close()

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            fds = [theirs.fileno(), *(segment.fd for segment in self._segments.values())]
            try:
                self._child = self._fork(fds)
            except BaseException:
                ours.close()
                raise
        self.ready = False
        self._channel = Channel(ours, blocking=False)
        last = next(iter(self.last.values()), None)
        self._channel.send(self._crew.first_message(self.sides, tuple(self._segments), last))

    def _fork(self, fds: list[int]) -> Child:
        zygote = Zygote.shared()
        try:
            return zygote.fork(self._crew.entry, fds, self._preload)
        except SmpartError:
            if zygote.alive:
                raise
        logger.warning("the process that forks workers ended; starting another")
        return Zygote.shared().fork(self._crew.entry, fds, self._preload)

    def _understand(self, message: Ready | Done) -> list[Completion]:
        if isinstance(message, Ready):
            if message.error is not None:
                raise SmpartError(f"{self._name} cannot start: {message.error}")
            self._crew.ready(message.info)
            self.ready = True
            return []
        work = self.pending.pop(message.id)
        fault = None if message.error is None else LaneFault(message.error, lost=False)
        return [Completion(work, message.started, message.finished, message.result, fault)]

    def _bury(self, code: int) -> list[Completion]:
        """Replace a worker that ended; its unfinished works, lost."""
        now = time.monotonic()
        lost = [
            Completion(work, now, now, fault=LaneFault(f"{self._name} {_manner(code)}", lost=True))
            for work in self.pending.values()
        ]
        logger.warning("%s (pid %d) %s; starting another", self._name, self.pid, _manner(code))
        self.pending.clear()
        self._channel.close()
        self._child.close()
        self.deaths += 1
        self._recent.append(now)
        if len(self._recent) == _MOST_DEATHS and now - self._recent[0] < _DEATHS_WINDOW_S:
            raise SmpartError(
                f"{self._name} ended {_MOST_DEATHS} times within {_DEATHS_WINDOW_S:.0f} s, "
                f"the last time it {_manner(code)}; what it wrote to stderr may say why"
            )
        self._start()
        return lost


def _manner(code: int) -> str:
    """How a process ended, in words."""
    if code >= 0:
        return f"exited with code {code}"
    with contextlib.suppress(ValueError):
        return f"was killed by {signal.Signals(-code).name}"
    return f"was killed by signal {-code}"
