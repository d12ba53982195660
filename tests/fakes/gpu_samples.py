"""Samples of a GPU that `smpart.sim` prices, with noise: a profile whose truth comes from outside every predictor."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from smpart.partition import Device, Shape
from smpart.profiler.fingerprint import Fingerprint
from smpart.profiler.sample import Conditions, Point, Sample
from smpart.profiler.store import Store
from smpart.sim import RooflineCost, built_in

MODEL = built_in("llama-3.1-8b")
UNITS = 132
DEVICE = Device("H100", "sim", UNITS, tuple(range(UNITS)), 80 << 30)
NASTY = "<script>alert('x')</script>"
"""The name under which the model was profiled."""
ANCHOR = Point(Shape.decode(8, 8192), 96)


def samples(
    shapes: int, *, counts: Sequence[int] = (36, 96, 132), noise: float = 0.01, beside: bool = True
) -> list[Sample]:
    """Prefills and decode steps, `shapes` of each: alone on two numbers of units, and beside one of the other phase."""
    rng = np.random.default_rng(7)
    cost = RooflineCost(MODEL, "h100")
    found: list[Sample] = []

    def measure(point: Point, stage: str = "fill") -> None:
        seconds = cost(point.shape, point.units, point.neighbour, point.neighbour_units)
        repeats = (seconds * np.exp(noise * rng.standard_normal(3))).tolist()
        conditions = Conditions(sm_mhz=1700.0 + len(found), celsius=50.0)
        found.append(Sample(point, tuple(repeats), int(len(found) % 3 == 0), stage, 1.7e9 + 2 * len(found), conditions))

    sizes = np.exp2(rng.uniform(6, 13, size=(shapes, 2))).astype(int).tolist()
    prefills = [Shape.prefill([(new, old if old > 512 else 0)]) for new, old in sizes]
    rows = np.exp2(rng.uniform(0, 7, size=shapes)).astype(int).tolist()
    steps = [Shape.decode(batch, batch * old) for batch, (_, old) in zip(rows, sizes, strict=True)]
    for mine, others in ((prefills, steps), (steps, prefills)):
        for place, shape in enumerate(mine):
            for count in rng.permutation(list(counts))[:2].tolist():
                measure(Point(shape, count))
            if beside:
                count = counts[place % (len(counts) - 1)]
                measure(Point(shape, count, others[-1 - place], UNITS - count))
            if place % 3 == 0:
                measure(ANCHOR, "anchor")
    return found


def write(folder: Path, measured: Sequence[Sample]) -> Path:
    """A profile folder of these samples, said to have taken three minutes."""
    fingerprint = Fingerprint.of("sim:h100", DEVICE, MODEL, "bfloat16")
    with Store.create(folder, fingerprint, {"model": NASTY}) as store:
        store.add(measured, seconds=180.0)
    return folder
