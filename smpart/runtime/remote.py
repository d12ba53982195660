"""A worker process as the engine sees it: what it was given, what it said, how it ended, and the next one after it."""

from __future__ import annotations

import contextlib
import logging
import select
import signal
import socket
import time
from collections import deque
from collections.abc import Mapping, Sequence

from smpart.errors import SmpartError
from smpart.partition.split import Side
from smpart.partition.work import Completion, LaneFault, Work
from smpart.runtime.channel import Channel
from smpart.runtime.children import Child, Zygote
from smpart.runtime.crew import Crew
from smpart.runtime.messages import Done, Ready
from smpart.runtime.segments import SharedSegment

logger = logging.getLogger(__name__)

_MOST_DEATHS = 5
_DEATHS_WINDOW_S = 60.0
_HUNG_UP_S = 2.0
"""How long a worker that hung up may take to end."""


class RemoteWorker:
    """One seat of a crew. Started, it is up until it ends; then it may be started again.

    Attributes:
        seat: its place in the crew.
        up: whether there is a process.
        ready: whether that has said so.
        last: its last work, or that of the process before it.
        body: another number whenever what its body was told is not what was sent to it.
    """

    def __init__(self, crew: Crew, seat: int, segments: Mapping[str, SharedSegment], preload: Sequence[str]) -> None:
        self.seat = seat
        self.up = False
        self.ready = False
        self.last: Work | None = None
        self.body = 0
        self._pending: dict[int, Work] = {}
        self._crew = crew
        self._segments = segments
        self._preload = preload
        self._recent: deque[float] = deque(maxlen=_MOST_DEATHS)

    @property
    def name(self) -> str:
        """For messages."""
        return self._crew.seats[self.seat].name

    @property
    def pid(self) -> int:
        """Process id; of the last process, if it is not up."""
        return self._child.pid

    def start(self) -> None:
        """Start a process. Raises `SmpartError`."""
        ours, theirs = socket.socketpair()
        with theirs:
            own = [theirs.fileno(), *(segment.fd for segment in self._segments.values())]
            try:
                self._child = self._fork([*own, *self._crew.fds(self.seat)])
            except BaseException:
                ours.close()
                raise
        self.up, self.ready = True, False
        self._channel = Channel(ours, blocking=False)
        self._channel.send(self._crew.first_message(self.seat, tuple(self._segments), self.last))

    def register(self, poller: select.poll) -> None:
        """Have a poller notice all that `collect` would see."""
        poller.register(self._channel, select.POLLIN | (select.POLLOUT if self._channel.unsent else 0))
        poller.register(self._child.fd, select.POLLIN)

    def launch(self, work: Work, packed: bytes) -> None:
        """Send it a work, as `pack` made it of the crew's message."""
        self._pending[work.id] = work
        self.last = work
        self._channel.post(packed)

    def works_for(self, side: Side) -> bool:
        """Whether it has works of a side that it did not finish."""
        return any(work.side is side for work in self._pending.values())

    def collect(self) -> tuple[list[Completion], int | None]:
        """What it has finished, and the exit code if it was found to have ended; then call `bury`.

        Raises:
            SmpartError: it cannot build its body.
        """
        # Ask about its end first: what the worker said before it died is then complete in the channel.
        code = self._child.join(0)
        done = [completion for message in self._channel.pump() for completion in self._understand(message)]
        if code is None and self._channel.closed:
            code = self._child.join(_HUNG_UP_S)
            if code is None:  # it hung up and yet lives: it must not touch the segments any more
                self.kill()
                code = self._child.join(None)
        return done, code

    def kill(self) -> None:
        """End the process now."""
        if self._pending:
            self._crew.before_kill(self.pid)
        self._child.kill()

    def join(self) -> int:
        """Wait for its end; the exit code."""
        code = self._child.join(None)
        assert code is not None
        return code

    def bury(self, code: int) -> list[Completion]:
        """Forget a process that has ended; its unfinished works, lost."""
        logger.warning("%s (pid %d) %s; starting another", self.name, self.pid, _manner(code))
        lost = [gone(work, f"{self.name} {_manner(code)}") for work in self._pending.values()]
        self._pending.clear()
        self._channel.close()
        self._child.close()
        self.up = self.ready = False
        self.body += 1  # now, not when the next one starts: works may be held for that before it does
        return lost

    def count_death(self, code: int) -> None:
        """Raise `SmpartError` if it has ended by itself too often."""
        now = time.monotonic()
        self._recent.append(now)
        if len(self._recent) == _MOST_DEATHS and now - self._recent[0] < _DEATHS_WINDOW_S:
            raise SmpartError(
                f"{self.name} ended {_MOST_DEATHS} times within {_DEATHS_WINDOW_S:.0f} s, "
                f"the last time it {_manner(code)}; what it wrote to stderr may say why"
            )

    def ask_to_end(self) -> None:
        """Hang up. An idle worker closes its body and ends; a busy one is killed."""
        if self._pending or not self.ready:
            self.kill()
        self._channel.close()

    def end(self, deadline: float) -> None:
        """See that the worker is gone, by `deadline` (seconds by `time.monotonic`) at the latest."""
        if self._child.join(max(0.0, deadline - time.monotonic())) is None:
            self.kill()
            self._child.join(None)
        self._child.close()
        self.up = False

    def _fork(self, fds: list[int]) -> Child:
        zygote, entry = Zygote.shared(), self._crew.seats[self.seat].entry
        try:
            return zygote.fork(entry, fds, self._preload)
        except SmpartError:
            if zygote.alive:
                raise
        logger.warning("the process that forks workers ended; starting another")
        return Zygote.shared().fork(entry, fds, self._preload)

    def _understand(self, message: Ready | Done) -> list[Completion]:
        if isinstance(message, Ready):
            if message.error is not None:
                raise SmpartError(f"{self.name} cannot start: {message.error}")
            self._crew.ready(self.seat, message.info)
            self.ready = True
            return []
        work = self._pending.pop(message.id)
        fault = None if message.error is None else LaneFault(message.error, lost=False)
        return [Completion(work, message.started, message.finished, message.result, fault)]


def gone(work: Work, why: str) -> Completion:
    """The end of a work that is lost."""
    now = time.monotonic()
    return Completion(work, now, now, fault=LaneFault(why, lost=True))


def _manner(code: int) -> str:
    """How a process ended, in words."""
    if code >= 0:
        return f"exited with code {code}"
    with contextlib.suppress(ValueError):
        return f"was killed by {signal.Signals(-code).name}"
    return f"was killed by signal {-code}"
