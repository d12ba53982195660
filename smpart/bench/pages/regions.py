"""Coarse sizes of forwards, so that hundreds of points make a table that a person can read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from smpart.partition import Shape
from smpart.profiler.sample import Point


class Region(NamedTuple):
    """A range of sizes, ordered from small to large.

    Attributes:
        order: its place among those of the same kind.
        label: as it is shown.
    """

    order: int
    label: str


def bucket(value: float, base: int) -> Region:
    """The range between two powers of `base` that a size lies in, its upper end included.

    >>> [bucket(v, 4).label for v in (0, 1, 3, 16, 17, 5000)]
    ['0', '1', '2–4', '5–16', '17–64', '4,097–16,384']
    """
    if value < 1:
        return Region(-1, "0")
    power = 0
    while base**power < value:
        power += 1
    lowest = base ** (power - 1) + 1 if power else 1
    return Region(power, "1" if not power else _span(lowest, base**power))


def _span(lowest: int, highest: int) -> str:
    return f"{lowest:,}" if lowest == highest else f"{lowest:,}–{highest:,}"  # noqa: RUF001 (a range)


def phase(shape: Shape) -> str:
    """prefill, decode or hybrid."""
    return "hybrid" if shape.hybrid else "prefill" if shape.prefill_tokens else "decode"


def prompt_region(shape: Shape) -> tuple[Region, Region]:
    """Of a prefill: tokens computed, and tokens of context before each prompt's chunk."""
    return bucket(shape.prefill_tokens, 4), bucket(shape.prefill_context / max(1, shape.prefill_chunks), 4)


def step_region(shape: Shape) -> tuple[Region, Region]:
    """Of a decode step: sequences, and tokens of context of each."""
    return bucket(shape.decode_batch, 4), bucket(shape.decode_context / max(1, shape.decode_batch), 4)


def load(shape: Shape) -> Region:
    """A forward in a word or two: its phase, and how much it computes."""
    if shape.hybrid:
        return Region(2000, "hybrid step")
    if shape.prefill_tokens:
        tokens = bucket(shape.prefill_tokens, 4)
        return Region(1000 + tokens.order, f"prefill of {tokens.label}")
    rows = bucket(shape.decode_batch, 4)
    return Region(rows.order, f"decode of {rows.label}")


def neighbour(point: Point) -> Region:
    """What runs beside a point: a forward, or a contender kernel."""
    return Region(3000, point.contender.kind) if point.contender.kind else load(point.neighbour)


def split(point: Point) -> Region:
    """Units of the forward, and of its neighbour."""
    label = str(point.units) if point.alone else f"{point.units} | {point.neighbour_units}"
    return Region(1000 * point.units + point.neighbour_units, label)


class Grid(NamedTuple):
    """Values gathered by two regions: float64[rows, columns], NaN where there was none, and how many there were."""

    rows: list[str]
    columns: list[str]
    values: NDArray[np.float64]
    counts: NDArray[np.intp]


def gather(
    keys: Iterable[tuple[Region, Region]],
    values: Sequence[float],
    reduce: Callable[[NDArray[np.float64]], float] = lambda part: float(np.median(part)),
) -> Grid:
    """Put values into a table of two regions, reduced (to their median) cell by cell."""
    cells: dict[tuple[Region, Region], list[float]] = {}
    for key, value in zip(keys, values, strict=True):
        cells.setdefault(key, []).append(value)
    rows, columns = (sorted({key[axis] for key in cells}) for axis in (0, 1))
    shape = len(rows), len(columns)
    grid = Grid([r.label for r in rows], [c.label for c in columns], np.full(shape, np.nan), np.zeros(shape, np.intp))
    for (row, column), found in cells.items():
        place = rows.index(row), columns.index(column)
        grid.values[place], grid.counts[place] = reduce(np.array(found)), len(found)
    return grid
