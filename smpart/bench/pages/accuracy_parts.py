"""Sections of a profile's page that tell how far held-out predictions are off, and where."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from smpart.bench.heldout import Held, Measured
from smpart.bench.judgement import OURS, Judgement
from smpart.bench.pages.ink import INK, draw, heat
from smpart.bench.pages.page import Block, Drawing, Section, Table, Text, percent
from smpart.bench.pages.regions import Grid, gather, load, neighbour, phase, prompt_region, split, step_region
from smpart.bench.plots import COLOURS
from smpart.predictor.accuracy import errors
from smpart.profiler.sample import Point

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Floats = NDArray[np.float64]
Rows = list[int]

COMPANY = {"solo": "alone", "corun": "beside a neighbour", "scaling": "alone, on numbers of units left out"}
_WORST = 0.15
"""The error that the darkest cell of a heat map stands for."""


def tested(held: Held) -> Rows:
    """Points that a test is about."""
    return np.flatnonzero(held.fold >= 0).tolist()


def missing(judgement: Judgement, test: str) -> Text:
    """Why there is nothing to show of a test."""
    return Text(f"Forwards {COMPANY[test]}: no held-out figures. {judgement.reasons(OURS)[test]}.")


def errors_by_phase(judgement: Judgement) -> Section:
    """A table of errors by phase, for each test."""
    blocks: list[Block] = [
        Text(
            "Absolute percentage error of the predicted against the median measured time. Forwards alone are predicted "
            "without any sample of their shape; forwards beside a neighbour without any sample of that pair of shapes."
        )
    ]
    rows: list[Sequence[str]] = []
    for test, company in COMPANY.items():
        held = judgement.held(OURS, test)
        if held is None:
            blocks.append(missing(judgement, test))
            continue
        points = judgement.measured.points
        phases = {name: [r for r in tested(held) if phase(points[r].shape) == name] for name in COLOURS}
        cases = {**phases, "all": tested(held)}
        rows += [_error_row(f"{name}, {company}", judgement.measured, held, part) for name, part in cases.items()]
    rows = [row for row in rows if row]
    if rows:
        blocks.insert(1, Table(["", "median", "95th percentile", "largest", "points"], rows))
    return Section("Error by phase", blocks)


def _error_row(name: str, measured: Measured, held: Held, rows: Rows) -> list[str]:
    if not rows:
        return []
    found = errors(measured.seconds[rows], held.predicted[rows])
    return [name, percent(found.median_ape), percent(found.p95_ape), percent(found.max_ape), str(found.cases)]


def errors_by_shape(judgement: Judgement) -> Section:
    """Heat maps over the sizes of prefills and decode steps."""
    axes = {
        "prefill": (prompt_region, "prompt tokens computed", "context tokens before them"),
        "decode": (step_region, "sequences in the step", "context tokens of each sequence"),
    }
    blocks: list[Block] = []
    for test in ("solo", "corun"):
        held = judgement.held(OURS, test)
        if held is None:
            blocks.append(missing(judgement, test))
            continue
        for name, (region, down, across) in axes.items():
            points = judgement.measured.points
            rows = [r for r in tested(held) if phase(points[r].shape) == name]
            if rows:
                grid = gather((region(points[r].shape) for r in rows), _off(judgement.measured, held, rows))
                title = f"Median error of {name} {COMPANY[test]}"
                blocks += [_error_map(title, grid, down, across), _counts(title, grid, down)]
    return Section("Error by shape", blocks)


def errors_by_split(judgement: Judgement) -> Section:
    """Heat maps over splits, and the scaling test by number of units."""
    blocks: list[Block] = []
    across = {"solo": "units it runs on", "corun": "its units | the neighbour's", "scaling": "units, all left out"}
    for test, axis in across.items():
        held = judgement.held(OURS, test)
        if held is None:
            blocks.append(missing(judgement, test))
            continue
        points, rows = judgement.measured.points, tested(held)
        keys = ((load(points[r].shape), split(points[r])) for r in rows)
        grid = gather(keys, _off(judgement.measured, held, rows))
        blocks.append(_error_map(f"Median error by split, {COMPANY[test]}", grid, "forward (tokens)", axis))
    return Section("Error by split", blocks)


def _off(measured: Measured, held: Held, rows: Rows) -> list[float]:
    return [float(off) for off in np.abs(held.predicted[rows] / measured.seconds[rows] - 1.0)]


def _error_map(title: str, grid: Grid, down: str, across: str) -> Drawing:
    def paint(axes: list[Axes]) -> None:
        heat(axes[0], grid.values, grid.rows, grid.columns, percent, (0.0, _WORST))
        axes[0].set(xlabel=across, ylabel=down)

    return Drawing(
        draw(title, paint, size=map_size(grid)), f"{title}. The darkest cell stands for {_WORST:.0%} or more."
    )


def map_size(grid: Grid, panels: int = 1) -> tuple[float, float]:
    """Inches that heat maps side by side need."""
    return panels * (1.9 + 0.85 * len(grid.columns)), 1.2 + 0.36 * len(grid.rows)


def _counts(title: str, grid: Grid, down: str) -> Table:
    rows = [
        [name, *(str(n) if n else "" for n in part.tolist())] for name, part in zip(grid.rows, grid.counts, strict=True)
    ]
    return Table([down, *grid.columns], rows, f"{title}: how many points each cell has")


def parity(judgement: Judgement) -> Section:
    """Predicted against measured time, alone and beside a neighbour."""
    helds = {test: held for test in ("solo", "corun") if (held := judgement.held(OURS, test)) is not None}
    blocks: list[Block] = [missing(judgement, test) for test in ("solo", "corun") if test not in helds]
    if helds:

        def paint(axes: list[Axes]) -> None:
            for axis, (test, held) in zip(axes, helds.items(), strict=True):
                _parity_panel(axis, judgement.measured, held, COMPANY[test])

        svg = draw("Predicted against measured time", paint, size=(4.6 * len(helds), 4.2), columns=len(helds))
        caption = "Each dot is a held-out point: on the line, prediction and measurement agree. Dashed: 10 % off."
        blocks.insert(0, Drawing(svg, caption))
    return Section("Predicted against measured", blocks)


def _parity_panel(axis: Axes, measured: Measured, held: Held, company: str) -> None:
    rows = tested(held)
    ends = np.array([measured.seconds[rows].min() * 0.8, measured.seconds[rows].max() * 1.25]) * 1e3
    axis.plot(ends, ends, color=INK, linewidth=0.8)
    for factor in (0.9, 1.1):
        axis.plot(ends, factor * ends, color=INK, linewidth=0.6, linestyle="--")
    for name, colour in COLOURS.items():
        mine = [r for r in rows if phase(measured.points[r].shape) == name]
        if mine:
            x, y = measured.seconds[mine] * 1e3, held.predicted[mine] * 1e3
            axis.scatter(x, y, s=12, color=colour, linewidths=0, alpha=0.75, label=name)
    axis.set(xscale="log", yscale="log", xlabel="measured (ms)", ylabel="predicted (ms)", title=f"Forwards {company}")
    axis.grid()
    axis.legend()


def slowdowns(judgement: Judgement) -> Section:
    """How much slower each kind of forward is beside each kind of neighbour: measured, and as predicted held out."""
    held = judgement.held(OURS, "corun")
    if held is None:
        return Section("Slowdown beside a neighbour", [missing(judgement, "corun")])
    measured, rows = judgement.measured, tested(held)
    found, own = _measured_slowdown(measured, held, rows)
    keys = [(load(measured.points[r].shape), neighbour(measured.points[r])) for r in rows]
    maps = gather(keys, found.tolist()), gather(keys, (held.predicted[rows] / held.alone[rows]).tolist())
    top = max(1.05, float(np.nanmax([maps[0].values, maps[1].values])))

    def paint(axes: list[Axes]) -> None:
        for axis, grid, title in zip(axes, maps, ("measured", "predicted, held out"), strict=True):
            heat(axis, grid.values, grid.rows, grid.columns, lambda value: f"{value:.2f}×", (1.0, top))  # noqa: RUF001
            axis.set(xlabel="beside it runs (tokens)", title=f"Slowdown {title}")
        axes[0].set_ylabel("the forward (tokens)")

    width, height = map_size(maps[0], 2)
    caption = (
        "Median time beside the neighbour over time alone on the same units, over all splits. "
        f"Of {len(rows)} points, {own} have a measurement alone on the same units; the others are compared with the "
        "time alone that is predicted for them."
    )
    svg = draw("Slowdown beside a neighbour", paint, size=(width, height), columns=2)
    difference = np.abs(found / (held.predicted[rows] / held.alone[rows]) - 1.0)
    text = Text(f"Predicted and measured slowdown differ by {percent(float(np.median(difference)))} in the median.")
    return Section("Slowdown beside a neighbour", [Drawing(svg, caption), text])


def _measured_slowdown(measured: Measured, held: Held, rows: Rows) -> tuple[Floats, int]:
    """Time beside the neighbour over time alone, and of how many points the latter was measured."""
    alone = {
        point: seconds for point, seconds in zip(measured.points, measured.seconds.tolist(), strict=True) if point.alone
    }
    solos = [alone.get(Point(measured.points[r].shape, measured.points[r].units)) for r in rows]
    predicted = held.alone[rows].tolist()
    compared = np.array([p if s is None else s for s, p in zip(solos, predicted, strict=True)])
    return measured.seconds[rows] / compared, sum(s is not None for s in solos)
