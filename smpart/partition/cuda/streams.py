"""Two lanes on CUDA streams: work is queued on the stream of its side's SMs, and who queues it waits for nothing.

Everything is queued from the caller's one thread; a watcher a lane sleeps until the device has finished. A new split
is another stream of the same lane, which first waits, on the device, for the lane's last work on the old one.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from smpart.errors import SmpartError
from smpart.partition.cuda.driver import CudaError, Driver
from smpart.partition.cuda.events import Events, Marks
from smpart.partition.cuda.places import Place, Places
from smpart.partition.cuda.timeline import Timeline
from smpart.partition.device import Device
from smpart.partition.inflight import Inflight
from smpart.partition.split import Side, Split
from smpart.partition.work import Completion, LaneFault, Work

logger = logging.getLogger(__name__)

Reader = Callable[[], Any]


class StreamBody(Protocol):
    """What a lane queues for a payload. Both lanes' bodies are used by one thread, that of the lanes' caller."""

    def enqueue(self, payload: Any, place: Place) -> Reader:
        """Queue everything on ``place.stream`` and return at once, without waiting for the device.

        The reader is called, on another thread, once all of it has completed; it returns the result. An exception,
        here or in the reader, fails this work only.
        """

    def close(self) -> None:
        """Free what the body holds. The device is idle."""


class StreamLanes:
    """`Lanes` over the streams of a device's places. For one caller's thread, except `wake`.

    Args:
        places: those of both sides, or of the one side that this process serves.
        bodies: makes each lane's body, on the caller's thread. The device's primary context is current there, and
            stays so.

    Raises:
        CudaError: no events can be made; nothing is left behind.
    """

    depth = 2
    epoch = 0

    def __init__(self, driver: Driver, device: Device, places: Places, bodies: Callable[[Side], StreamBody]) -> None:
        self.device = device
        self._places = places
        self._all = dict(places.all())
        self._splits = places.splits()
        self._inflight = Inflight(self._splits, self.depth, places.disjoint)
        self._changed = threading.Condition()
        self._done: list[Completion] = []
        self._woken = False
        self._closed = False
        self._lost: BaseException | None = None
        self._lanes: dict[Side, _Lane] = {}
        driver("cuCtxSetCurrent", places.primary)
        # A work's end is also the next one's measure, so one ring more than there are works in flight.
        self._events = Events(driver, self._all.values(), self.depth + 1)
        try:
            for side in {side: None for side, _ in self._all}:
                self._lanes[side] = _Lane(driver, places.primary, side, bodies(side), self._land)
        except BaseException:
            self.close()
            raise

    def body(self, side: Side, split: Split) -> Side:
        """One a side, for life."""
        return side

    def splits(self) -> tuple[Split, ...]:
        """Every split that was made."""
        return self._splits

    def overlapping(self) -> tuple[Split, ...]:
        """None: a stream of the whole device beside another one is not built yet."""
        return ()

    def disjoint(self, prefill: Split, decode: Split) -> bool:
        """True for the two sides of one split; for sides of two splits only where their SMs were seen to differ."""
        return self._places.disjoint(prefill, decode)

    def now(self) -> float:
        """`time.monotonic`."""
        return time.monotonic()

    def launch(self, work: Work) -> None:
        """Queue one work on the device.

        Raises:
            UsageError: see `Inflight.add`.
            EngineClosed: after `close`.
            SmpartError: the device was lost, and with it this process's use of it.
        """
        if self._lost is not None:
            raise SmpartError(f"the device was lost ({self._lost}); start this process again")
        with self._changed:
            self._inflight.add(work)
        place = self._all[work.side, work.split]
        self._lanes[work.side].launch(work, place, self._events.next(place))

    def wait(self, until: float | None) -> list[Completion]:
        """Block until a completion, a `wake`, `close`, or `until`; all completions so far."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._done or self._woken or self._closed,
                None if until is None else until - time.monotonic(),
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
        """As many of the side's positions as the driver says the lane's SMs are; none before its first work.

        These are positions, not the hardware's own numbers: `smpart doctor` finds those out with a kernel.
        """
        place = self._lanes[side].place
        if place is None:
            return frozenset()
        count, ids = self._places.read_back(place), self.device.unit_ids
        return frozenset(ids[:count] if side is Side.PREFILL else ids[len(ids) - count :])

    def close(self) -> None:
        """Let the device finish what is queued, drop what comes of it, and give the events back. Idempotent."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._inflight.close()
            self._changed.notify_all()
        for lane in self._lanes.values():
            lane.close()
        self._events.close()

    def _land(self, completion: Completion, error: BaseException | None) -> None:
        """A work ended, in a lane's watcher; `error`: the device was lost with it."""
        with self._changed:
            self._lost = self._lost or error
            self._inflight.remove(completion.work)
            if not self._closed:
                self._done.append(completion)
            self._changed.notify_all()


@dataclass(eq=False, slots=True)
class _Flight:
    """A queued work.

    Attributes:
        before: the marks of the lane's previous work, if that was on the same stream.
        read: makes its result; None: it could not be queued.
        error: why not.
        lost: a mark could not be set, so that its end will never be seen.
    """

    work: Work
    marks: Marks
    before: Marks | None = None
    read: Reader | None = None
    error: BaseException | None = None
    lost: CudaError | None = None


class _Lane:
    """One side: the place it is at, what it has queued there, and the thread that sees it end."""

    def __init__(
        self,
        driver: Driver,
        primary: Any,
        side: Side,
        body: StreamBody,
        land: Callable[[Completion, BaseException | None], None],
    ) -> None:
        self.place: Place | None = None
        self._driver = driver
        self._primary = primary
        self._body = body
        self._land = land
        self._last: Marks | None = None
        self._launched = self._landed = 0  # by the caller's thread; by the watcher's
        self._timeline = Timeline()
        self._queue: deque[_Flight | None] = deque()
        self._queued = threading.Semaphore(0)
        self._record = driver.function("cuEventRecord")
        self._wait_event = driver.function("cuStreamWaitEvent")
        self._watcher = threading.Thread(target=self._watch, name=f"smpart-{side}-watcher", daemon=True)
        self._watcher.start()

    def launch(self, work: Work, place: Place, marks: Marks) -> None:
        """Queue one work between its marks."""
        flight = _Flight(work, marks)
        try:
            before = self._move(place)
            # Over a time of idleness the device's clock has drifted: only what follows at once is measured from it.
            flight.before = before if self._launched > self._landed else None
            self._record(marks.start, place.stream)
            try:
                flight.read = self._body.enqueue(work.payload, place)
            except BaseException as error:
                logger.exception("%s lane: work %d failed", work.side, work.id)
                flight.error = error
                if not isinstance(error, Exception):  # an interrupt: the lane goes on, its caller hears of it
                    raise
            finally:
                self._record(marks.end, place.stream)
                self._last = marks
        except CudaError as error:
            flight.lost = error
        finally:
            self._launched += 1
            self._put(flight)

    def close(self) -> None:
        """See everything end, then close the body."""
        self._put(None)
        self._watcher.join()
        try:
            self._body.close()
        except Exception:
            logger.exception("a lane's body did not close")

    def _move(self, place: Place) -> Marks | None:
        """Go on at `place`; the marks of the work before, if that was there too."""
        if self.place is place:
            return self._last
        if self._last is not None:
            self._wait_event(place.stream, self._last.end, 0)
        self.place = place
        return None

    def _put(self, flight: _Flight | None) -> None:
        self._queue.append(flight)
        self._queued.release()

    def _watch(self) -> None:
        lost: BaseException | None = None
        try:
            self._driver("cuCtxSetCurrent", self._primary)
        except CudaError as error:
            lost = error
        while True:
            self._queued.acquire()
            flight = self._queue.popleft()
            if flight is None:
                return
            completion = None
            try:
                if lost is None:
                    completion = self._see(flight)
            except BaseException as error:  # whatever it was: a lane that nobody watches would wait for ever
                lost = error
            self._landed += 1
            self._land(completion or _gone(flight.work, lost), lost)

    def _see(self, flight: _Flight) -> Completion:
        """Wait for a work's end. Raises `CudaError`: it will never be seen."""
        if flight.lost is not None:
            raise flight.lost
        self._driver("cuEventSynchronize", flight.marks.end)
        seen = time.monotonic()
        took = self._seconds(flight.marks.start, flight.marks.end)
        since = self._seconds(flight.before.end, flight.marks.end) if flight.before is not None else None
        started, finished = self._timeline.place(seen, took, since)
        result, error = None, flight.error
        if flight.read is not None:
            try:
                result = flight.read()
            except BaseException as raised:
                logger.exception("%s lane: work %d failed", flight.work.side, flight.work.id)
                error = raised
        fault = LaneFault(f"{type(error).__name__}: {error}", lost=False) if error is not None else None
        return Completion(flight.work, started, finished, result, fault)

    def _seconds(self, start: Any, end: Any) -> float:
        return float(self._driver("cuEventElapsedTime", start, end)) / 1e3


def _gone(work: Work, error: BaseException | None) -> Completion:
    now = time.monotonic()
    return Completion(work, now, now, None, LaneFault(f"the device was lost: {error}", lost=True))
