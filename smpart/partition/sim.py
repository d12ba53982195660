"""Backend `sim`: two lanes on a virtual clock, priced by an injected cost function."""

from __future__ import annotations

import logging
import re
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import inf
from typing import Any

from smpart.errors import UsageError
from smpart.partition.backend import Backend
from smpart.partition.device import Device
from smpart.partition.feasible import overlapping_splits
from smpart.partition.gpus import GPUS
from smpart.partition.inflight import Inflight
from smpart.partition.lanes import Body, BodyFactory
from smpart.partition.registry import register
from smpart.partition.shape import Shape
from smpart.partition.split import Side, Split, nested_or_overlapping
from smpart.partition.work import Completion, LaneFault, Work

logger = logging.getLogger(__name__)

Cost = Callable[[Shape, int, Shape, int], float]
"""Seconds of a whole forward: (its shape, its units, the neighbour's shape, the neighbour's units).

The neighbour is taken to run all the while. Without one its shape is empty and its units are 0. Where the units of
both are more than the device has, they share some.
"""

_NOTHING = Shape()


@dataclass(slots=True)
class _Running:
    """A work under way: at `since` it is `left` forwards short of its end, and a whole one takes `cost` from there."""

    work: Work
    units: int
    started: float
    since: float
    left: float
    cost: float
    finish: float


class _Lane:
    __slots__ = ("body", "placed", "queue", "running")

    def __init__(self, body: Body) -> None:
        self.body = body
        self.queue: deque[tuple[Work, Split]] = deque()
        self.running: _Running | None = None
        self.placed: Split | None = None


class SimLanes:
    """`Lanes` in virtual time: only `wait` moves the clock, from event to event.

    A work's pace depends on its own units and on what the neighbour is doing. Whenever the neighbour starts or ends
    a work, or `resize` moves the line, what is left of the work is priced anew from that moment: progress is the
    exact integral of a pace that is constant between events. The body runs at the moment of completion and takes no
    virtual time.

    Args:
        cost: prices a forward; must be positive and finite.
        factory: makes each lane's body.
    """

    depth = 2
    epoch = 0

    def __init__(self, device: Device, splits: Iterable[Split], cost: Cost, factory: BodyFactory) -> None:
        self.device = device
        self._splits = tuple(splits)
        self._cost = cost
        self._overlapping = overlapping_splits(self._splits)
        self._disjoint = nested_or_overlapping(device.units)
        self._inflight = Inflight(self._splits, self.depth, self._disjoint, self._overlapping)
        self._now = 0.0
        self._prefill, self._decode = (_Lane(factory(side)) for side in Side)
        self._woken = False
        self._closed = False

    def body(self, side: Side, split: Split) -> Side:
        """One a side, for life."""
        return side

    @property
    def cost(self) -> Cost:
        """What prices its works."""
        return self._cost

    def splits(self) -> tuple[Split, ...]:
        """Every split that can be realised."""
        return self._splits

    def overlapping(self) -> tuple[Split, ...]:
        """Every pair of shares with units in common."""
        return self._overlapping

    def disjoint(self, prefill: Split, decode: Split) -> bool:
        """Whether two sides under these splits may run at once: units have fixed positions."""
        return self._disjoint(prefill, decode)

    def now(self) -> float:
        """Virtual seconds since the lanes were made."""
        return self._now

    def launch(self, work: Work) -> None:
        """Queue one work; it starts now if its lane is idle.

        Raises `UsageError` (see `Inflight.add`) or, after `close`, `EngineClosed`.
        """
        self._inflight.add(work)
        lane = self._lane(work.side)
        lane.queue.append((work, work.split))
        if lane.running is None:
            self._start(lane)
            self._reprice()

    def resize(self, split: Split) -> None:
        """Put all works in flight on another split, from this moment on. A side that gets nothing stands still.

        Raises:
            UsageError: no such split.
        """
        self._inflight.resize(split)
        for side in Side:
            lane = self._lane(side)
            lane.queue = deque((work, split) for work, _ in lane.queue)
            if lane.running is not None:
                lane.running.units = split.units(side)
                lane.placed = split
        self._reprice()

    def wait(self, until: float | None) -> list[Completion]:
        """Advance the clock to the next completion, or to `until` if that comes first; all completions at that time.

        Returns at once, the clock unmoved, after a `wake` and where nothing would ever happen.
        """
        if self._woken or self._closed:
            self._woken = False
            return []
        moment = self._next_finish()
        if until is not None and until < moment:
            self._now = max(self._now, until)
            return []
        if moment == inf:
            return []
        self._now = moment
        done: list[Completion] = []
        prefill, decode = self._prefill, self._decode
        # A work that starts at this very moment may also end in it.
        while moment >= self._next_finish():
            if prefill.running is not None and prefill.running.finish <= moment:
                done.append(self._complete(prefill, prefill.running))
            if decode.running is not None and decode.running.finish <= moment:
                done.append(self._complete(decode, decode.running))
            self._reprice()
        return done

    def wake(self) -> None:
        """Make the next `wait` return at once."""
        self._woken = True

    def realised(self, side: Side) -> frozenset[int]:
        """Unit ids of the work that runs, or ran last, on the side; empty before its first."""
        split = self._lane(side).placed
        if split is None:
            return frozenset()
        return frozenset(self.device.unit_ids[i] for i in split.indices(side, self.device.units))

    def close(self) -> None:
        """Drop all work and close the bodies. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._inflight.close()
        for lane in (self._prefill, self._decode):
            lane.queue.clear()
            lane.running = None
            lane.body.close()

    def _lane(self, side: Side) -> _Lane:
        return self._prefill if side is Side.PREFILL else self._decode

    def _next_finish(self) -> float:
        prefill, decode = self._prefill.running, self._decode.running
        first = inf if prefill is None else prefill.finish
        return first if decode is None or first <= decode.finish else decode.finish

    def _start(self, lane: _Lane) -> None:
        """Begin the lane's next work, if there is one; it has no price yet."""
        if not lane.queue:
            lane.running = None
            return
        work, split = lane.queue.popleft()
        lane.placed = split
        lane.running = _Running(work, split.units(work.side), self._now, self._now, work.fraction, inf, inf)

    def _reprice(self) -> None:
        """Bring both works' progress to the present and let them go on at the pace that holds from now."""
        prefill, decode = self._prefill.running, self._decode.running
        if prefill is not None:
            self._price(prefill, decode)
        if decode is not None:
            self._price(decode, prefill)

    def _price(self, running: _Running, neighbour: _Running | None) -> None:
        if running.units == 0:
            cost = inf
        elif neighbour is None or neighbour.units == 0:
            cost = self._cost(running.work.shape, running.units, _NOTHING, 0)
        else:
            cost = self._cost(running.work.shape, running.units, neighbour.work.shape, neighbour.units)
        if cost == running.cost:
            return
        if not cost > 0.0:
            raise ValueError(f"the cost function answered {cost} s for {running.work.shape}: it must be above 0")
        if running.cost != inf:
            running.left = max(0.0, running.left - (self._now - running.since) / running.cost)
        running.since, running.cost = self._now, cost
        running.finish = inf if cost == inf else self._now + running.left * cost

    def _complete(self, lane: _Lane, running: _Running) -> Completion:
        work = running.work
        self._inflight.remove(work)
        result: Any = None
        fault: LaneFault | None = None
        try:
            result = lane.body.run(work.payload)
        except Exception as error:
            logger.exception("%s lane: work %d failed", work.side, work.id)
            fault = LaneFault(f"{type(error).__name__}: {error}", lost=False)
        self._start(lane)
        return Completion(work, running.started, self._now, result, fault)


class Sim:
    """The `Backend` for one kind of GPU. What its work costs is injected when `SimLanes` are made.

    Args:
        gpu: a name of `GPUS`.
        roofline: price by peak rates instead of measured kernels.
        ranks: GPUs that share every matmul (tensor parallelism). The lanes are those of each of them alike.
        contention: multiplies what a work takes beside a neighbour: 1.1 makes a neighbour 10 % worse than assumed.

    Raises:
        UsageError: no such GPU, or a number that makes no sense.
    """

    def __init__(self, gpu: str, *, roofline: bool = False, ranks: int = 1, contention: float = 1.0) -> None:
        if gpu not in GPUS:
            raise UsageError(f"no GPU {gpu!r} is known; there are {', '.join(GPUS)}")
        if ranks < 1 or not 1.0 <= contention <= 10.0:
            raise UsageError(f"sim:{gpu}: {ranks} GPUs and contention times {contention:g} make no sense")
        if roofline and contention != 1.0:
            raise UsageError(
                f"sim:{gpu}: ~F worsens measured kernels, -roofline has slowdowns of its own: give one of them"
            )
        self.gpu = gpu
        self.roofline = roofline
        self.ranks = ranks
        self.contention = contention
        many, worse = f"x{ranks}" if ranks > 1 else "", f"~{contention:g}" if contention != 1.0 else ""
        self.name = f"sim:{gpu}{'-roofline' if roofline else ''}{many}{worse}"

    def device(self) -> Device:
        """One rank's SMs, numbered from 0, and its memory."""
        gpu = GPUS[self.gpu]
        capability = ".".join(map(str, gpu.capability))
        facts = {"compute_capability": capability}
        return Device(self.name, "sim", gpu.sms, tuple(range(gpu.sms)), gpu.memory_bytes, facts)

    def splits(self) -> tuple[Split, ...]:
        """What the hardware's group sizes allow."""
        return GPUS[self.gpu].splits()

    def why_unusable(self) -> str | None:
        """None: a virtual device is always there."""
        return None


_FORM = re.compile(
    rf"(?P<gpu>{'|'.join(GPUS)})(?P<roofline>-roofline)?(x(?P<ranks>\d+))?(~(?P<contention>\d+(\.\d+)?))?"
)


@register("sim", kind="sim", rank=None, arguments=tuple(f"{gpu}[-roofline][xN][~F]" for gpu in GPUS))
def open_sim(argument: str) -> Backend:
    """A virtual GPU by name: ``h100``, ``h100-roofline``, four that share a model ``h100x4``, and ``h100~1.2``."""
    found = _FORM.fullmatch(argument)
    assert found is not None  # the registry has checked the form
    return Sim(
        found["gpu"],
        roofline=found["roofline"] is not None,
        ranks=int(found["ranks"] or 1),
        contention=float(found["contention"] or 1.0),
    )
