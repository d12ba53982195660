"""Turns a fitted estimator into tables: it is asked once at every node of their grids."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import astuple
from typing import Any

import numpy as np
from numpy.typing import NDArray

from smpart.predictor.estimators.base import UNITS, Floats
from smpart.predictor.estimators.contention import Contention
from smpart.predictor.estimators.phase import DECODE, HYBRID, PREFILL, decode_place, phases, prefill_place
from smpart.predictor.surface import Axis
from smpart.predictor.tables import PACKED, Tables, fewest_chunks
from smpart.profiler.sample import COLUMNS

_STEP = 0.25
"""Of an axis, in powers of two: seconds of a fixed part and a growing one are then off by 0.1 % between nodes."""
_BEYOND = 2.0
"""Powers of two that grids go beyond what was measured, where physics alone speaks."""
_COLUMN = {name: place for place, name in enumerate(COLUMNS)}

Arrays = dict[str, NDArray[Any]]


def compiled(estimator: Contention, counts: Iterable[int] = ()) -> Tables:
    """Tables of a fitted estimator.

    Args:
        counts: numbers of units to have exact tables for, besides those that were measured and the whole device.

    Raises:
        ValueError: a phase was never measured.
    """
    points = estimator.points_
    measured = {int(count) for count in points[:, UNITS]}
    units = sorted({estimator.units, *counts, *measured})
    arrays: Arrays = {
        "model": np.array(astuple(estimator.model), dtype=np.int64),
        "units": np.array([estimator.units, *units], dtype=np.int64),
    }
    _tabulate_alone(arrays, estimator, units, "prefill", prefill_place(points[phases(points) & PREFILL > 0]))
    _tabulate_alone(arrays, estimator, units, "decode", decode_place(points[phases(points) & DECODE > 0]))
    _tabulate_hybrid(arrays, estimator)
    _tabulate_beside(arrays, estimator, units)
    return Tables(arrays)


def _tabulate_alone(arrays: Arrays, estimator: Contention, units: list[int], phase: str, seen: Floats) -> None:
    """Log seconds alone by units, and the width of the bound where it is widest over the units."""
    if not len(seen):
        raise ValueError(f"no {phase} was measured: nothing can be said of it")
    axes = [Axis.over(0.0, seen[:, 0].max() + _BEYOND, _STEP), Axis.over(1.0, seen[:, 1].max() + _BEYOND, _STEP)]
    grid, counts = _nodes(*axes), np.array(units, dtype=np.float64)
    rows = _prefills(grid, 1.0) if phase == "prefill" else _decodes(grid)
    _put(arrays, phase, axes, estimator.alone_.over(rows, counts).T)
    if phase == "prefill":
        _put(arrays, "prefill_packed", axes, estimator.alone_.over(_prefills(grid, PACKED), counts).T)
    unsure = []
    for count in {units[0], units[len(units) // 2], units[-1]}:
        rows[:, UNITS] = count
        unsure.append(estimator.alone_.unsure(rows))
    width = estimator.width(PREFILL if phase == "prefill" else DECODE, beside=False)
    arrays[f"{phase}_margin"] = (width * np.max(unsure, axis=0)).astype(np.float32)


def _nodes(x: Axis, z: Axis) -> Floats:
    grid: Floats = np.stack(np.meshgrid(x.nodes, z.nodes, indexing="ij"), axis=-1).reshape(-1, 2)
    return grid


def _prefills(grid: Floats, chunks: float) -> Floats:
    """Prefills at places: so many equal prompts, each behind a context; more where tokens attend to few others."""
    tokens, span = np.exp2(grid[:, 0]), np.maximum(np.exp2(grid[:, 1]) - 1.0, 1.0)
    packed = np.maximum(chunks, fewest_chunks(tokens, span))
    rows = np.zeros((len(grid), len(COLUMNS)))
    rows[:, _COLUMN["prefill_tokens"]] = tokens
    rows[:, _COLUMN["prefill_context"]] = packed * np.maximum(0.0, span - (tokens / packed + 1.0) / 2.0)
    rows[:, _COLUMN["prefill_pairs"]] = tokens * span
    rows[:, _COLUMN["prefill_chunks"]] = packed
    return rows


def _decodes(grid: Floats) -> Floats:
    batch, context = np.exp2(grid[:, 0]), np.exp2(grid[:, 1]) - 1.0
    rows = np.zeros((len(grid), len(COLUMNS)))
    rows[:, _COLUMN["decode_batch"]] = batch
    rows[:, _COLUMN["decode_context"]] = batch * context
    return rows


def _tabulate_hybrid(arrays: Arrays, estimator: Contention) -> None:
    """log(seconds of a hybrid step / those of its prefill part) over log2 seconds of both parts."""
    points, alone = estimator.points_, estimator.alone_
    spans = []
    for phase in (PREFILL, DECODE):
        seen = points[phases(points) == phase]
        logs = np.log2(estimator.predict(_whole(seen, estimator.units)))
        spans.append(Axis.over(logs.min() - _BEYOND, logs.max() + _BEYOND, _STEP))
    grid = _nodes(*spans)
    logs, unsure = alone.hybrid_.joined(grid * np.log(2.0), np.full(len(grid), float(estimator.units)))
    _put(arrays, "hybrid", spans, logs - grid[:, 0] * np.log(2.0))
    arrays["hybrid_margin"] = (unsure * estimator.width(HYBRID, beside=False)).astype(np.float32)


def _tabulate_beside(arrays: Arrays, estimator: Contention, units: list[int]) -> None:
    """Log slowdown by units over log2 of what a forward and its neighbour ask of the memory, bytes a second."""
    widths = []
    for phase, name in ((PREFILL, "prefill"), (DECODE, "decode")):
        made = estimator.slowdowns_.get(phase)
        asked = made.asked_ if made is not None else np.array([[0.0, 0.0], [1.0, 1.0]])
        axes = [Axis.over(column.min() - _BEYOND, column.max() + _BEYOND, _STEP) for column in asked.T]
        grid = _nodes(*axes)
        logs = [np.zeros(len(grid)) if made is None else made.at(grid, count)[0] for count in units]
        _put(arrays, f"{name}_beside", axes, np.array(logs))
        widths.append(estimator.plain_width(phase, beside=True))
    arrays["beside_margin"] = np.array(widths)


def _put(arrays: Arrays, name: str, axes: list[Axis], values: Floats) -> None:
    arrays[name] = values.astype(np.float32)
    arrays[f"{name}_axes"] = np.array([[axis.start, axis.step, axis.count] for axis in axes])


def _whole(rows: Floats, units: int) -> Floats:
    """The same forwards alone on the whole device."""
    whole = rows.copy()
    whole[:, UNITS:] = 0.0
    whole[:, UNITS] = units
    return whole
