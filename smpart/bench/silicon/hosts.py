"""The overheads of engines, from every other one of the measured points."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import product
from typing import NamedTuple

import numpy as np

from smpart.bench.silicon.engines import engine_of
from smpart.bench.silicon.loop import busy, predict
from smpart.bench.silicon.points import EndToEnd
from smpart.sim import Host

AT_ODDS = 1.05
"""Points that keep their GPUs busier than this (`busy`) are at odds with the op tables and are not fitted on."""

_EACH = 16
"""Points of each GPU, engine, version and model that are replayed."""

_LONGEST = 3_000
_MOST = 70_000
"""Tokens of an answer, and of all clients' answers together: longer points take too long to replay."""

_STEPS = np.arange(0.0, 4.01e-3, 0.1e-3)
_SEQUENCES = np.arange(0.0, 81e-6, 4e-6)


class Gap(NamedTuple):
    """A point replayed without overheads.

    Attributes:
        measured, kernels: seconds a token, measured and replayed.
    """

    clients: int
    measured: float
    kernels: float


def chosen(points: Iterable[EndToEnd]) -> dict[str, list[EndToEnd]]:
    """By family of engines the points to fit on. The family ``vllm`` has none: the real run gives its overheads."""
    groups: dict[tuple[str, ...], list[EndToEnd]] = defaultdict(list)
    for point in points:
        short = point.output < _LONGEST and point.concurrency * point.output < _MOST
        family = engine_of(point).family
        if point.fitted_on and short and point.together and family != "vllm" and busy(point) < AT_ODDS:
            groups[family, point.gpu, point.version, point.name.split()[0]].append(point)
    found: dict[str, list[EndToEnd]] = defaultdict(list)
    for key, group in sorted(groups.items()):
        found[key[0]] += random.Random(0).sample(group, min(_EACH, len(group)))
    return dict(found)


def fit_hosts(points: Iterable[EndToEnd], watch: Callable[[str], None]) -> dict[str, Host]:
    """By family of engines the overheads that fit best. Takes minutes."""
    found = {}
    for family, group in chosen(points).items():
        watch(f"{family}: {len(group)} points")
        free = Host(step=0.0)
        found[family] = nearest([Gap(p.concurrency, p.tpot, float(predict(p, free).tpot.mean())) for p in group])
    return found


def nearest(gaps: Sequence[Gap]) -> Host:
    """The overheads of a step and a sequence that leave the least mean relative error a token, on a grid.

    A token takes a step, so the overhead of a step adds to the seconds of a token.
    """
    clients, measured, kernels = (np.array(column, dtype=float) for column in zip(*gaps, strict=True))

    def off(at: tuple[float, float]) -> float:
        return float(np.abs((kernels + at[0] + at[1] * clients) / measured - 1).mean())

    step, sequence = min(product(_STEPS.tolist(), _SEQUENCES.tolist()), key=off)
    return Host(step=round(step, 7), sequence=round(sequence, 9))
