"""Decode steps as graphs: what capturing takes, replay against eager, memory, and that a graph stays in its lane."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from time import perf_counter
from typing import Any

import numpy as np

from smpart.bench.gpu_check.record import Figures, Record, Setting, spread
from smpart.bench.gpu_check.rig import Rig
from smpart.kvcache import KVConfig
from smpart.partition import Lanes, Side, Split
from smpart.partition.cuda.driver import Driver, driver
from smpart.partition.cuda.places import Place
from smpart.partition.cuda.program import Program, pointer, uint64
from smpart.partition.green import Green, GreenPlaces
from smpart.profiler.timer import Timer, collect
from smpart.profiler.works import Works
from smpart.runtime.device.graph_check import contexts_of

_ROWS = (1, 8, 32, 64, 2, 4, 16, 128)
"""Batch sizes that are captured, the ones that are timed first."""
_TIMED = 4
_STEPS = 12
_CONTEXT = 512
_BLOCKS_PER_UNIT, _SHARED, _HOLD_NS = 10, 48 * 1024, 100_000
"""As `smpart.partition.cuda.sm_probe` has them."""


def measure(setting: Setting, record: Record) -> None:
    """The proof on a bare graph first, then a model's steps."""
    with Green().open() as places, Program(driver(), places.gpu, places.primary) as program:
        stays(driver(), program, places, record)
    context = 40 if setting.tiny else _CONTEXT
    rows = [count for count in _ROWS if not setting.tiny or count in (1, 4)]
    with Rig(setting, "1b", KVConfig(blocks=(context // 16 + 1) * 136, max_len=1024, max_requests=136)) as rig:
        eager = _eager(rig, rows[:_TIMED], context, setting)
        record.put(eager=eager)
        _captured(rig, rows, context, setting, record)


def stays(api: Driver, program: Program, places: GreenPlaces, record: Record) -> None:
    """Capture a kernel on one lane's stream, replay it on the other's, and see on whose SMs it runs."""
    split = next(split for split in places.splits() if not split.exclusive)
    mine, other = (places.all()[side, split] for side in (Side.DECODE, Side.PREFILL))
    blocks = places.gpu.units * _BLOCKS_PER_UNIT
    kernel, memory = program.kernel("smid_probe", "probe"), program.memory(20 * blocks)
    arguments = (pointer(memory + 16 * blocks), pointer(memory), uint64(_HOLD_NS))

    def seen(place: Place) -> frozenset[int]:
        program.wait(place)
        return frozenset(program.read(memory + 16 * blocks, np.zeros(blocks, np.int32)).tolist())

    program.launch(kernel, mine, blocks, 32, arguments, _SHARED)
    direct = seen(mine)
    api("cuStreamBeginCapture", mine.stream, api.api.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)
    program.launch(kernel, mine, blocks, 32, arguments, _SHARED)
    graph = api("cuStreamEndCapture", mine.stream)
    contexts = contexts_of(api, int(graph))
    replayed = _replay(api, graph, other, seen)
    record.put(
        graph_sms={"captured_on": len(direct), "replayed_elsewhere": len(replayed), "same": direct == replayed},
        driver_names_context="the lane's" if contexts == {int(mine.context)} else sorted(contexts),
    )
    record.require(direct == replayed, "a graph replayed on another lane's stream left the SMs it was captured on")


def _replay(api: Driver, graph: Any, place: Place, seen: Any) -> frozenset[int]:
    with api.current(place.context):
        ready = api("cuGraphInstantiate", graph, 0)
        api("cuGraphLaunch", ready, place.stream)
    found: frozenset[int] = seen(place)
    api("cuGraphExecDestroy", ready)
    api("cuGraphDestroy", graph)
    return found


def _eager(rig: Rig, rows: Sequence[int], context: int, setting: Setting) -> list[Figures]:
    """Steps that are not captured, on the middle split."""
    machine = rig.machine(graphs=False)
    works = Works(rig.board, machine.info.blocks, rig.kv.block_tokens, setting.seed)
    try:
        middle = _middle(machine.lanes.splits())
        return [_steps(machine.lanes, works, middle, count, context, _repeats(setting)) for count in rows]
    finally:
        machine.lanes.close()


def _captured(rig: Rig, rows: Sequence[int], context: int, setting: Setting, record: Record) -> None:
    machine = rig.machine()
    graphs = machine.graphs
    assert graphs is not None
    works = Works(rig.board, machine.info.blocks, rig.kv.block_tokens, setting.seed)
    warnings = _Warnings()
    logging.getLogger("smpart").addHandler(warnings)
    lanes = [split for split in machine.lanes.splits() if split.decode][: 2 if setting.tiny else None]
    middle = _middle(machine.lanes.splits())
    free = rig.parts.free_bytes()
    captures: list[float] = []
    replays: list[Figures] = []
    asked = 0
    try:
        for number, (count, split) in enumerate(_order(rows, lanes, middle)):
            captures.append(_first(machine.lanes, works, split, count, context))
            asked += 1
            if number < min(_TIMED, len(rows)):
                replays.append(_steps(machine.lanes, works, split, count, context, _repeats(setting)))
            record.put(
                replay=replays,
                asked=asked,
                captured=len(graphs),
                first_step_ms=spread([1e3 * each for each in captures]),
                **_memory(graphs.memory_bytes, free - rig.parts.free_bytes(), rig.parts.device.memory_bytes),
                not_captured=warnings.lines[:3],
            )
            if record.left() < 5.0:
                break
    finally:
        machine.lanes.close()
    missing = asked - len(graphs)
    record.require(not missing, f"{missing} of {asked} steps were not captured: {warnings.lines[:1]}")


def _memory(counted: int, gone: int, whole: int) -> Figures:
    """What the graphs take: as torch counts it, and as free memory has become less; the share is of the larger."""
    return {
        "graphs_mib": round(counted / 2**20, 1),
        "free_memory_gone_mib": round(gone / 2**20, 1),
        "graphs_share": round(max(counted, gone) / whole, 5),
    }


def _order(rows: Sequence[int], splits: Sequence[Split], middle: Split) -> list[tuple[int, Split]]:
    """What is captured, in order: the sizes that are timed first, on the middle split."""
    return [(count, middle) for count in rows] + [(c, split) for c in rows for split in splits if split != middle]


def _first(lanes: Lanes, works: Works, split: Split, rows: int, context: int) -> float:
    """Seconds that the host takes for a step that is run once as it is, and captured."""
    work = works.decode(split, rows, context)
    began = perf_counter()
    lanes.launch(work)
    took = perf_counter() - began
    collect(lanes, 1)
    return took


def _steps(lanes: Lanes, works: Works, split: Split, rows: int, context: int, repeats: int) -> Figures:
    """Steps of one size, one at a time: the device's seconds and the host's."""
    device, host = [], []
    work = works.decode(split, rows, context)
    Timer(lanes, works).one(work)
    for _ in range(repeats):
        again = works.again(work)
        began = perf_counter()
        lanes.launch(again)
        host.append(1e3 * (perf_counter() - began))
        (done,) = collect(lanes, 1)
        device.append(1e3 * done.seconds)
    return {"split": str(split), "rows": rows, "step_ms": spread(device), "launch_ms": spread(host)}


def _repeats(setting: Setting) -> int:
    return 2 if setting.tiny else _STEPS


def _middle(splits: Sequence[Split]) -> Split:
    shared = [split for split in splits if not split.exclusive]
    return min(shared, key=lambda split: abs(split.prefill - split.decode))


class _Warnings(logging.Handler):
    """Keeps what is warned of: why a step was not captured is said there."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the line."""
        self.lines.append(record.getMessage()[:300])
