"""Lanes with a known cost for tests of the profiler: what is measured can be compared with the truth."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from smpart.engine.ghost import GhostBoard, GhostBody
from smpart.partition import Completion, Device, Lanes, ModelShape, Shape, Side, Split, Work
from smpart.partition.feasible import feasible_splits
from smpart.partition.sim import SimLanes
from smpart.partition.threads import ThreadLanes
from smpart.partition.work import LaneFault
from smpart.profiler.experiment import Experiment
from smpart.profiler.fingerprint import Fingerprint
from smpart.profiler.sample import Point, Sample
from smpart.profiler.space import Space
from smpart.profiler.store import Store
from smpart.profiler.sweep import Sweep
from smpart.profiler.works import Works
from smpart.runtime.batch import StepResult

MODEL = ModelShape(2, 64, 4, 2, 16, 512, 100_000, 32_768, 500_000, 4)
SPLITS = feasible_splits(4)


def cost(shape: Shape, units: int, neighbour: Shape, neighbour_units: int) -> float:
    """The truth: grows with every size, shrinks with units, and a neighbour costs by how much it reads."""
    alone = 2e-3 + 4e-4 * shape.tokens / units + 1e-7 * shape.prefill_pairs / units + 1e-6 * shape.decode_context
    return alone * (1.0 + (0.1 + 1e-5 * neighbour.decode_context if neighbour_units else 0.0))


def truth(point: Point) -> float:
    return cost(point.shape, point.units, point.neighbour, point.neighbour_units)


def device(units: int = 4) -> Device:
    return Device("toy", "sim", units, tuple(range(units)), 1 << 30)


def sim_lanes(splits: Sequence[Split] = SPLITS) -> SimLanes:
    return SimLanes(device(splits[-1].prefill), splits, cost, GhostBody)


class Sleeper:
    """A body whose forwards take as long as their rows say, outside the interpreter."""

    def __init__(self, side: Side) -> None:
        self._ghost = GhostBody(side)
        self._never = threading.Event()

    def run(self, payload: object) -> StepResult:
        batch = payload.batch  # type: ignore[attr-defined]
        tokens = len(batch.decode_slots) + sum(chunk.length for chunk in batch.chunks)
        self._never.wait(1e-3 + 1e-5 * tokens)
        return self._ghost.run(payload)  # type: ignore[arg-type]

    def close(self) -> None:
        pass


class Anywhere:
    """A placement that moves nobody."""

    def place(self, side: Side, split: Split) -> None:
        pass

    def realised(self, side: Side) -> frozenset[int]:
        return frozenset()


def thread_lanes() -> ThreadLanes:
    return ThreadLanes(device(), SPLITS, Sleeper, Anywhere())


def works(max_len: int = 512, slots: int = 24, blocks: int = 400) -> Works:
    return Works(GhostBoard(slots, max_len), blocks, 16)


def fingerprint() -> Fingerprint:
    return Fingerprint.of("toy", device(), MODEL, "float32")


def store(folder: Path) -> Store:
    return Store.create(folder, fingerprint(), {"seed": 0})


def sweep(lanes: Lanes, kept: Store, seconds: float, **options: object) -> Sweep:
    made = works()
    space = Space.of(made, lanes.splits(), 256, 256, 8)
    expected = options.pop("expected", lambda shape, units, beside: cost(shape, units, beside, 0))
    return Sweep(lanes, made, space, kept, seconds, seed=0, expected=expected, **options)  # type: ignore[arg-type]


def run(made: Sweep) -> list[str]:
    """The stages it went through."""
    return [progress.stage for progress in made.run()]


def experiments(samples: Iterable[Sample]) -> list[Point]:
    return [sample.point for sample in samples if sample.stage != "anchor"]


class Troubled:
    """Lanes around lanes, that do something to completions on their way.

    Attributes:
        at: launches so far.
    """

    def __init__(self, inner: Lanes) -> None:
        self.inner = inner
        self.device = inner.device
        self.depth = inner.depth
        self.epoch = 0
        self.at = 0
        self.lose: set[int] = set()
        self.interrupt: int | None = None

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)

    def launch(self, work: Work) -> None:
        self.at += 1
        if self.at == self.interrupt:
            raise KeyboardInterrupt
        self.inner.launch(work)

    def wait(self, until: float | None) -> list[Completion]:
        done = self.inner.wait(until)
        if done and self.lose and self.at >= min(self.lose):
            self.lose.discard(min(self.lose))
            first = done[0]
            done[0] = Completion(first.work, first.started, first.finished, None, LaneFault("the worker ended", True))
        return done


def completion(experiment: Experiment, side: Side, started: float, finished: float) -> Completion:
    return Completion(Work(1, side, experiment.split, Shape(), 1.0, None), started, finished)


def soon(until: float = 30.0) -> float:
    return time.monotonic() + until
