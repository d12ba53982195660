"""What a switch of a lane to another split costs, on the host and on the device; and what the contexts cost."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from time import perf_counter
from typing import Any

import numpy as np

from smpart.bench.gpu_check.record import Record, Setting, spread
from smpart.partition import Shape, Side, Split, Work
from smpart.partition.cuda.driver import Driver, driver
from smpart.partition.cuda.gpu import Gpu
from smpart.partition.cuda.places import Place
from smpart.partition.cuda.program import Program, pointer, uint64
from smpart.partition.cuda.streams import StreamLanes
from smpart.partition.green import Green, GreenPlaces

_LAUNCHES = 400
_WAITS = 2000
_KERNELS = 64
_HOLD_NS = 300_000
"""How long each kernel runs: longer than queueing the next one takes, so that the device never waits for the host."""


class Nothing:
    """A body that queues nothing: what is left is the lane's own work."""

    def __init__(self, side: Side) -> None:
        self.side = side

    def enqueue(self, payload: Any, place: Place) -> Callable[[], None]:
        """See `StreamBody`."""
        return lambda: None

    def close(self) -> None:
        """Nothing is held."""


def measure(setting: Setting, record: Record) -> None:
    """Contexts, then the host's side of a switch, then the device's."""
    api = driver()
    gpu = Gpu.find(api)
    api("cuDevicePrimaryCtxRetain", gpu.handle)  # its own cost is not the green contexts'
    places = contexts(record)
    lanes = StreamLanes(api, Green().device(), places, Nothing)
    host(lanes, record)
    lanes.close()
    wait_event(api, places, record)
    with Program(api, places.gpu, places.primary) as program:
        device(api, program, places, record)
    places.close()
    api("cuDevicePrimaryCtxRelease", gpu.handle)


def contexts(record: Record) -> GreenPlaces:
    """Make all splits, twice: the first time loads what the driver needs. The second's are returned."""
    took = []
    for turn in range(2):
        began = perf_counter()
        places = Green().open()
        took.append(perf_counter() - began)
        if turn == 0:
            places.close()
    count = sum(place.green is not None for place in places.all().values())
    record.put(
        splits=len(places.splits()),
        contexts=count,
        contexts_first_ms=round(took[0] * 1e3, 2),
        contexts_ms=round(took[1] * 1e3, 2),
        context_ms=round(took[1] * 1e3 / max(1, count), 3),
        contexts_mib=round(places.memory_bytes / 2**20, 1),
    )
    return places


def host(lanes: StreamLanes, record: Record) -> None:
    """Host time of launching on another split than before, and of launching on the same one."""
    shared = [split for split in lanes.splits() if not split.exclusive]
    same, moved = launches(lanes, [shared[0]]), launches(lanes, shared)
    record.put(
        launch_same_us=spread(same),
        launch_moved_us=spread(moved),
        switch_host_us=round(float(np.median(moved)) - float(np.median(same)), 2),
    )


def launches(lanes: StreamLanes, splits: Sequence[Split]) -> list[float]:
    """Microseconds of each launch on the decode lane, going round the splits."""
    took = []
    for number, split in zip(range(_LAUNCHES), itertools.cycle(splits), strict=False):
        work = Work(number, Side.DECODE, split, Shape.decode(1, 1), 1.0, None)
        began = perf_counter()
        lanes.launch(work)
        took.append((perf_counter() - began) * 1e6)
        while not lanes.wait(None):
            pass
    return took[_LAUNCHES // 8 :]


def wait_event(api: Driver, places: GreenPlaces, record: Record) -> None:
    """Host time of the one driver call that a switch is."""
    ours = decode_places(places)
    with api.current(ours[0].context):
        event = api("cuEventCreate", int(api.api.CUevent_flags.CU_EVENT_BLOCKING_SYNC))
    wait, took = api.function("cuStreamWaitEvent"), []
    api("cuEventRecord", event, ours[0].stream)
    for place in itertools.islice(itertools.cycle(ours[1:] or ours), _WAITS):
        began = perf_counter()
        wait(place.stream, event, 0)
        took.append((perf_counter() - began) * 1e6)
    for place in ours:
        api("cuStreamSynchronize", place.stream)
    api("cuEventDestroy", event)
    record.put(wait_event_us=spread(took))


def device(api: Driver, program: Program, places: GreenPlaces, record: Record) -> None:
    """Time between two kernels of a lane on the device's clock: on one stream, and across a switch."""
    ours = decode_places(places)
    gaps(api, program, [ours[0]] * 4)
    same, moved = (
        gaps(api, program, list(itertools.islice(itertools.cycle(turn), _KERNELS))) for turn in ([ours[0]], ours)
    )
    record.put(
        gap_same_us=spread(same),
        gap_moved_us=spread(moved),
        switch_device_us=round(float(np.median(moved)) - float(np.median(same)), 2),
    )


def gaps(api: Driver, program: Program, order: Sequence[Place]) -> list[float]:
    """Microseconds from each kernel's end to the next one's start, as a lane queues them.

    As in a lane, an event marks the end of each kernel, and another stream waits for it.
    """
    kernel = program.kernel("smid_probe", "probe")
    events: list[Any] = []
    seen = program.memory(4 * len(order) + 16 * len(order))
    spans = seen
    for index, place in enumerate(order):
        if index and order[index - 1] is not place:
            api("cuStreamWaitEvent", place.stream, events[-1], 0)
        arguments = (pointer(seen + 16 * len(order) + 4 * index), pointer(spans + 16 * index), uint64(_HOLD_NS))
        program.launch(kernel, place, 1, 32, arguments)
        events.append(_mark(api, place))
    program.wait(*set(order))
    for event in events:
        api("cuEventDestroy", event)
    times = program.read(spans, np.zeros((len(order), 2), np.uint64)).astype(np.int64)
    return [float(gap) / 1e3 for gap in times[1:, 0] - times[:-1, 1]]


def decode_places(places: GreenPlaces) -> list[Place]:
    """The decode side of every split with two sides."""
    every: Iterable[tuple[tuple[Side, Split], Place]] = places.all().items()
    return [place for (side, split), place in every if side is Side.DECODE and not split.exclusive]


def _mark(api: Driver, place: Place) -> Any:
    with api.current(place.context):
        event = api("cuEventCreate", int(api.api.CUevent_flags.CU_EVENT_DEFAULT))
    api("cuEventRecord", event, place.stream)
    return event
