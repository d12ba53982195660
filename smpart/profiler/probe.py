"""A first look at a device: a few forwards on idle lanes, so that the first plan already knows its speed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from smpart.partition import Shape, Split, Work
from smpart.profiler.timer import Timer, steady
from smpart.profiler.works import Works

_STEPS = 3
"""Decode steps beside a prefill that are told."""


class Probe(NamedTuple):
    """One measured forward: `seconds` of `shape` on `units` units beside `neighbour` (empty: alone)."""

    shape: Shape
    units: int
    neighbour: Shape
    seconds: float


def first_look(
    works: Works, timer: Timer, splits: tuple[Split, ...], budget_s: float, now: Callable[[], float]
) -> Iterator[Probe]:
    """Probe a few shapes alone, on the whole device and on half of it, then both lanes side by side.

    Each lane is warmed up once, unmeasured. The most telling probes come first; it stops when `budget_s` seconds are
    used up.

    Args:
        splits: every split there is, in order of prefill units.
        now: the lanes' clock.

    Raises:
        SmpartError: the forwards fail here.
    """
    begun = now()
    half = splits[len(splits) // 2]
    timer.one(_prefill(works, splits[-1], 8))
    timer.one(_decode(works, splits[0], 1, 8))
    for work in _alone(works, splits, half):
        yield Probe(work.shape, work.units, Shape(), timer.one(work).seconds)
        if now() - begun > budget_s:
            return
    if not half.exclusive:
        prefill, decode = _prefill(works, half, 128), _decode(works, half, 4, 64)
        prefills, steps = timer.beside(prefill, decode, 1)
        for step in steady(steps, prefills)[:_STEPS]:
            yield Probe(decode.shape, decode.units, prefill.shape, step.seconds)


def _alone(works: Works, splits: tuple[Split, ...], half: Split) -> Iterator[Work]:
    for prefill, decode in ((splits[-1], splits[0]), (half, half)):
        if prefill.prefill and decode.decode:
            yield _prefill(works, prefill, 64)
            yield _decode(works, decode, 1, 64)
            yield _decode(works, decode, 8, 64)
    yield _prefill(works, splits[-1], 256)


def _prefill(works: Works, split: Split, tokens: int) -> Work:
    """As many tokens as there is room for."""
    return works.prefill(split, ((min(tokens, works.longest), 0),))


def _decode(works: Works, split: Split, rows: int, context: int) -> Work:
    return works.decode(split, min(rows, len(works.row_slots)), min(context, works.longest))
