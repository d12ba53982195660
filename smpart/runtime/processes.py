"""Two lanes in two worker processes: `Lanes` on CPU cores, where threads would share one interpreter lock.

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
from dataclasses import replace
from typing import Any

from smpart.errors import SmpartError
from smpart.partition.cores import CorePlacement
from smpart.partition.device import Device
from smpart.partition.inflight import Inflight
from smpart.partition.split import Side, Split, nested
from smpart.partition.work import Completion, LaneFault, Work
from smpart.runtime.channel import Channel
from smpart.runtime.children import Child, Zygote
from smpart.runtime.segments import SharedSegment
from smpart.runtime.worker import Done, Init, Ready, Task

logger = logging.getLogger(__name__)

_DEPTH = 2
_MOST_DEATHS = 5
_DEATHS_WINDOW_S = 60.0
_CLOSE_S = 2.0
_WORKER = "smpart.runtime.worker:main"


class ProcessLanes:
    """`Lanes` over worker processes forked from the zygote. For one caller's thread, except `wake`.

    Args:
        device: its `unit_ids` are what splits share out.
        splits: every split of the device that can be realised.
        body: ``module:function`` of a `ProcessBodyFactory`, imported and called in each worker.
        placement: which CPUs each side of a split has.
        args: picklable, passed to it.
        segments: shared memory, passed to it by name. Stays the caller's, and open while the lanes are.
        preload: modules of torch or transformers whose memory the workers should share.

    Raises:
        SmpartError: a worker cannot start.
    """

    depth = _DEPTH

    def __init__(
        self,
        device: Device,
        splits: Sequence[Split],
        body: str,
        placement: CorePlacement,
        args: Any = None,
        segments: Mapping[str, SharedSegment] | None = None,
        *,
        preload: Sequence[str] = (),
    ) -> None:
        self.device = device
        self._splits = tuple(sorted(splits))
        self._placement = placement
        self._inflight = Inflight(self._splits, self.depth)
        self._lanes: dict[Side, _Lane] = {}
        self._wake_lock = threading.Lock()
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._open = True
        try:
            everywhere = frozenset(cpu for core in placement.cores for cpu in core.cpus)
            for side in Side:
                init = Init(side, body, args, tuple(segments or {}), everywhere, device.units)
                self._lanes[side] = _Lane(init, list((segments or {}).values()), preload)
            while not all(lane.ready for lane in self._lanes.values()):
                self._poll(None)
                self._collect()
        except BaseException:
            self.close()
            raise

    def splits(self) -> tuple[Split, ...]:
        """Every split that can be realised, in order of `Split.prefill`."""
        return self._splits

    def disjoint(self, prefill: Split, decode: Split) -> bool:
        """Whether two sides under these splits may run at once: units have fixed positions."""
        return nested(prefill, decode)

    def now(self) -> float:
        """Seconds by `time.monotonic`, which all processes of a machine share."""
        return time.monotonic()

    def launch(self, work: Work) -> None:
        """Queue one work; never blocks. Raises `UsageError` (see `Inflight.add`) or, after `close`, `EngineClosed`."""
        self._inflight.add(work)
        try:
            self._lanes[work.side].launch(work, self._placement.cpus(work.side, work.split))
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
        """Unit ids that any thread of the side's worker may run on, read back from /proc."""
        return self._placement.read_back(self._lanes[side].pid)

    def pid(self, side: Side) -> int:
        """Process id of the side's worker."""
        return self._lanes[side].pid

    def close(self) -> None:
        """End the workers. Idle ones close their body first; unfinished work is dropped."""
        with self._wake_lock:
            if not self._open:
                return
            self._open = False
            os.close(self._wake_fd)
        self._inflight.close()
        for lane in self._lanes.values():
            lane.ask_to_end()
        deadline = self.now() + _CLOSE_S
        for lane in self._lanes.values():
            lane.end(deadline)

    def _poll(self, until: float | None) -> bool:
        """Sleep until something happens or `until`; whether it was a wake."""
        poller = select.poll()
        poller.register(self._wake_fd, select.POLLIN)
        for lane in self._lanes.values():
            lane.register(poller)
        timeout = None if until is None else max(0.0, until - self.now()) * 1e3
        ready = {fd for fd, _ in poller.poll(timeout)}
        if self._wake_fd not in ready:
            return False
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake_fd)
        return True

    def _collect(self) -> list[Completion]:
        try:
            done = [completion for lane in self._lanes.values() for completion in lane.collect()]
        except SmpartError:
            self.close()
            raise
        for completion in done:
            self._inflight.remove(completion.work)
        return done


class _Lane:
    """One side's worker, what it has in flight, and its replacement when it dies."""

    def __init__(self, init: Init, segments: list[SharedSegment], preload: Sequence[str]) -> None:
        self.pending: dict[int, Work] = {}
        self.ready = False
        self._init = init
        self._segments = segments
        self._preload = preload
        self._deaths: deque[float] = deque(maxlen=_MOST_DEATHS)
        self._start()

    @property
    def pid(self) -> int:
        return self._child.pid

    def register(self, poller: select.poll) -> None:
        """Have a poller notice all that `collect` would see."""
        poller.register(self._channel, select.POLLIN | (select.POLLOUT if self._channel.unsent else 0))
        poller.register(self._child.fd, select.POLLIN)

    def launch(self, work: Work, cpus: frozenset[int]) -> None:
        self._channel.send(Task(work.id, cpus, work.units, work.payload))
        self.pending[work.id] = work
        self._init = replace(self._init, cpus=cpus, units=work.units)  # a replacement must not build on the neighbour's

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
            fds = [theirs.fileno(), *(segment.fd for segment in self._segments)]
            try:
                self._child = self._fork(fds)
            except BaseException:
                ours.close()
                raise
        self.ready = False
        self._channel = Channel(ours, blocking=False)
        self._channel.send(self._init)

    def _fork(self, fds: list[int]) -> Child:
        zygote = Zygote.shared()
        try:
            return zygote.fork(_WORKER, fds, self._preload)
        except SmpartError:
            if zygote.alive:
                raise
        logger.warning("the process that forks workers ended; starting another")
        return Zygote.shared().fork(_WORKER, fds, self._preload)

    def _understand(self, message: Ready | Done) -> list[Completion]:
        if isinstance(message, Ready):
            if message.error is not None:
                raise SmpartError(f"the {self._init.side} lane's worker cannot start: {message.error}")
            self.ready = True
            return []
        work = self.pending.pop(message.id)
        fault = None if message.error is None else LaneFault(message.error, lost=False)
        return [Completion(work, message.started, message.finished, message.result, fault)]

    def _bury(self, code: int) -> list[Completion]:
        """Replace a worker that ended; its unfinished works, lost."""
        now = time.monotonic()
        lost = [
            Completion(work, now, now, fault=LaneFault(f"the {work.side} lane's worker {_manner(code)}", lost=True))
            for work in self.pending.values()
        ]
        logger.warning("the %s lane's worker (pid %d) %s; starting another", self._init.side, self.pid, _manner(code))
        self.pending.clear()
        self._channel.close()
        self._child.close()
        self._deaths.append(now)
        if len(self._deaths) == _MOST_DEATHS and now - self._deaths[0] < _DEATHS_WINDOW_S:
            raise SmpartError(
                f"the {self._init.side} lane's worker ended {_MOST_DEATHS} times within {_DEATHS_WINDOW_S:.0f} s, "
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
