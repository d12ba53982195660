"""Prefill and decode alone and side by side, over the splits: the first measured contention table.

Every forward is timed by events of its own lane. A prefill is queued whole behind a kernel that holds its stream, so
that its seconds are the device's and not the host's; decode steps follow one another as in the engine. ``host_seconds``
is what launching took: where it comes near ``seconds``, the host set the pace.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from time import perf_counter

from smpart.bench.gpu_check.gate import Gate
from smpart.bench.gpu_check.record import Figures, Record, Setting, spread
from smpart.bench.gpu_check.rig import Rig
from smpart.bench.gpu_check.stages.device import clocks_now
from smpart.kvcache import KVConfig
from smpart.partition import Completion, Shape, Side, Split, Work
from smpart.partition.cuda.gpu import Gpu
from smpart.partition.cuda.program import Program
from smpart.profiler.timer import Timer, collect
from smpart.profiler.works import Works
from smpart.runtime.device.machine import Machine

PARTS_OF_PREFILL = (0.5, 0.75, 0.25, 0.88, 0.12, 0.62, 0.38)
"""Shares of the device that prefill gets in the splits that are measured, the most telling first."""
_SOLO, _STEPS, _BESIDE = 5, 16, 5
"""Repeats of a prefill alone, of a decode step alone, and of a prefill beside decode steps."""
_ENOUGH_S = 1.5
"""...but no further one after so many seconds of them."""
_WORTH_S, _MARGIN_S = 20.0, 6.0
"""A second model is begun with so much time left; so much is kept for the end."""


@dataclass(frozen=True, slots=True)
class Shapes:
    """What is measured: prefills of so many tokens; decode steps of rows with a context each."""

    prefills: Sequence[int]
    decodes: Sequence[tuple[int, int]]
    blocks: int
    max_len: int
    splits: int = len(PARTS_OF_PREFILL)


SHAPES = {
    "1b": Shapes((2048, 8192, 512), ((32, 2048), (8, 1024), (128, 512)), 8192, 8320),
    "8b": Shapes((2048, 8192), ((32, 2048), (8, 1024)), 6144, 8320),
    "tiny": Shapes((48,), ((4, 40),), 64, 128, splits=2),
}


@dataclass(frozen=True, slots=True)
class Timed:
    """One forward's seconds on the device, and the host's for launching it."""

    seconds: float
    host: float


class Table:
    """The rows of one model.

    Args:
        gate: None: prefills are timed as the host queues them.
    """

    def __init__(self, machine: Machine, works: Works, gate: Gate | None, model: str) -> None:
        self._machine, self._works, self._gate, self._model = machine, works, gate, model
        self._hold_s = 0.0

    def alone(self, work: Work) -> Figures:
        """A row of one shape alone."""
        if work.side is Side.DECODE:
            return self._row(work, None, self._steps(work))
        self._time(work)  # compiles
        timed: list[Timed] = []
        while len(timed) < _SOLO and sum(t.seconds for t in timed) < _ENOUGH_S:
            timed.append(self._time(work))
        return self._row(work, None, timed)

    def together(self, prefill: Work, decode: Work) -> list[Figures]:
        """Rows of both shapes beside each other: decode steps follow one another for as long as a prefill runs."""
        prefills: list[Timed] = []
        steps: list[Timed] = []
        while len(prefills) < _BESIDE and sum(t.seconds for t in prefills) < _ENOUGH_S:
            began = perf_counter()
            first = self._works.again(prefill)
            self._launch(first)
            host = perf_counter() - began
            done, pace = self._steps_until(first, decode)
            whole = next(c for c in done if c.work is first)
            prefills.append(Timed(whole.seconds, host))
            steps += [Timed(c.seconds, pace) for c in done if c.work.side is Side.DECODE and _within(c, whole)]
        return [self._row(prefill, decode, prefills), self._row(decode, prefill, steps)]

    def _steps(self, decode: Work) -> list[Timed]:
        """Steps that follow one another, as many in flight as the lane takes; the first ones, not yet so, left out."""
        lanes, flying, timed = self._machine.lanes, 0, list[Timed]()
        Timer(lanes, self._works).one(decode)  # captures and compiles
        while len(timed) < _STEPS + lanes.depth:
            while flying < lanes.depth:
                began = perf_counter()
                lanes.launch(self._works.again(decode))
                host = perf_counter() - began
                flying += 1
            came = collect(self._machine.lanes, 1)
            timed += [Timed(done.seconds, host) for done in came]
            flying -= len(came)
        collect(self._machine.lanes, flying)
        return timed[lanes.depth :]

    def _steps_until(self, first: Work, decode: Work) -> tuple[list[Completion], float]:
        """Keep decode steps in flight until the prefill has ended; all completions, and the median launch."""
        lanes, hosts, done, flying = self._machine.lanes, [], [], 0
        while True:
            while flying < lanes.depth:
                began = perf_counter()
                lanes.launch(self._works.again(decode))
                hosts.append(perf_counter() - began)
                flying += 1
            came = collect(self._machine.lanes, 1)
            done += came
            flying -= sum(c.work.side is Side.DECODE for c in came)
            if any(c.work is first for c in done):
                return done + (collect(self._machine.lanes, flying) if flying else []), median(hosts)

    def _time(self, work: Work) -> Timed:
        again = self._works.again(work)
        began = perf_counter()
        self._launch(again)
        host = perf_counter() - began
        (done,) = collect(self._machine.lanes, 1)
        if work.side is Side.PREFILL:
            self._hold_s = 1.5 * host + 0.002
        return Timed(done.seconds, host)

    def _launch(self, work: Work) -> None:
        if self._gate is not None and work.side is Side.PREFILL:
            self._gate.hold(self._machine.parts.places.all()[work.side, work.split], self._hold_s)
        self._machine.lanes.launch(work)

    def _row(self, work: Work, neighbour: Work | None, timed: Sequence[Timed]) -> Figures:
        beside = neighbour.shape if neighbour is not None else Shape()
        return {
            "model": self._model,
            "split": str(work.split),
            "side": work.side.value,
            **asdict(work.shape),
            **{f"neighbour_{name}": value for name, value in asdict(beside).items()},
            "units": work.units,
            "seconds": spread([t.seconds for t in timed], 5),
            "host_seconds": spread([t.host for t in timed])["median"],
            "clocks": clocks_now(),
        }


def measure(setting: Setting, record: Record) -> None:
    """One model after the other, as time allows."""
    rows: list[Figures] = []
    for scale, share in (("tiny", 1.0),) if setting.tiny else (("1b", 0.55), ("8b", 1.0)):
        if rows and record.left() < _WORTH_S:
            record.put(left_out=f"{scale}: {record.left():.0f} s were left")
            break
        _one(setting, scale, record, rows, share * (record.left() - _MARGIN_S))
    record.require(bool(rows), "nothing was measured")


def _one(setting: Setting, scale: str, record: Record, rows: list[Figures], seconds: float) -> None:
    shapes, began = SHAPES[scale], perf_counter()
    kv = KVConfig(blocks=shapes.blocks, max_len=shapes.max_len, max_requests=160)
    with Rig(setting, scale, kv) as rig:
        machine = rig.machine()
        try:
            works = Works(rig.board, shapes.blocks, kv.block_tokens, setting.seed)
            with Program(machine.parts.api, Gpu.find(machine.parts.api), machine.parts.places.primary) as program:
                table = Table(machine, works, Gate(program), scale)
                for made in _rows(table, works, machine.lanes.splits(), shapes):
                    rows += made
                    record.put(rows=rows, measured=len(rows))
                    if perf_counter() - began > seconds or record.left() < 6.0:
                        break
                rig.settle()
        finally:
            machine.lanes.close()


def _rows(table: Table, works: Works, splits: Sequence[Split], shapes: Shapes) -> Iterator[list[Figures]]:
    """Rows, the most telling first: each step takes a second or so."""
    chosen = pick(splits)[: shapes.splits]
    whole = (splits[-1], splits[0])
    for number in range(max(len(shapes.prefills), len(shapes.decodes))):
        tokens = shapes.prefills[number % len(shapes.prefills)]
        rows, context = shapes.decodes[number % len(shapes.decodes)]
        yield [table.alone(works.prefill(whole[0], ((tokens, 0),))), table.alone(works.decode(whole[1], rows, context))]
        for split in chosen:
            prefill, decode = works.prefill(split, ((tokens, 0),)), works.decode(split, rows, context)
            yield [table.alone(prefill), table.alone(decode), *table.together(prefill, decode)]


def _within(step: Completion, whole: Completion) -> bool:
    return whole.started <= step.started and step.finished <= whole.finished


def pick(splits: Sequence[Split]) -> list[Split]:
    """The splits nearest to `PARTS_OF_PREFILL`, each once."""
    shared = [split for split in splits if not split.exclusive]
    nearest = (min(shared, key=lambda s: abs(s.prefill / s.total - part)) for part in PARTS_OF_PREFILL)
    return list(dict.fromkeys(nearest))
