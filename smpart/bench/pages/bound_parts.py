"""Sections of a profile's page on the upper bounds, and on the published forms beside ours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from smpart.bench.heldout import Held, Measured, repeat_bounds
from smpart.bench.judgement import OURS, Judgement
from smpart.bench.pages.accuracy_parts import COMPANY, missing
from smpart.bench.pages.ink import INK, draw
from smpart.bench.pages.page import Block, Drawing, Section, Table, Text, percent
from smpart.bench.pages.regions import phase
from smpart.bench.plots import COLOURS
from smpart.predictor.accuracy import bound

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Floats = NDArray[np.float64]

_TESTS = {"solo": "#0072B2", "corun": "#D55E00"}
"""The tests that bounds are judged in, and the colours that they are drawn in."""
_LEVELS = np.array([0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.975, 0.99])
_WIDEST = 60.0
"""Percent of excess that the histogram ends at; what is beyond is counted in its last bar."""


def bounds(judgement: Judgement, nominal: float, tightest: Mapping[str, float | None]) -> Section:
    """Coverage and excess of the bounds, and whether the residuals behind them keep from fold to fold.

    Args:
        nominal: share of single runs that a bound promises to cover.
        tightest: by test, the excess of a bound that covers 99 % of them and knows every median.
    """
    blocks: list[Block] = [
        Text(
            f"Plans are made on an upper bound that {percent(nominal)} of single runs are to stay under. Judged on "
            "every single repeat of held-out points. Excess: how much longer the bound is than the run, on average."
        )
    ]
    helds = {test: held for test in _TESTS if (held := judgement.held(OURS, test)) is not None}
    blocks += [missing(judgement, test) for test in _TESTS if test not in helds]
    if helds:
        rows = [row for test, held in helds.items() for row in _coverage_rows(judgement.measured, held, COMPANY[test])]
        rows += [
            [f"the machine's noise alone, {COMPANY[test]}", percent(0.99), percent(excess), ""]
            for test, excess in tightest.items()
            if excess is not None
        ]
        blocks.append(Table(["", "covered", "mean excess", "repeats"], rows))

        def paint(axes: list[Axes]) -> None:
            _calibration(axes[0], judgement.measured, helds)
            _excess(axes[1], judgement.measured, helds)

        caption = (
            "Left: bounds set at a quantile of the residuals of all other folds, and the share of this fold's repeats "
            "that they cover; on the line, what was seen elsewhere holds here. Right: by how much the bounds that are "
            "used exceed single runs; left of 0 a run took longer than its bound."
        )
        blocks.append(Drawing(draw("Coverage and excess of the bounds", paint, size=(9.6, 4.0), columns=2), caption))
    return Section("Upper bounds", blocks)


def _coverage_rows(measured: Measured, held: Held, company: str) -> list[list[str]]:
    actual, upper, shares = repeat_bounds(measured, held)
    names = np.array([phase(measured.points[r].shape) for r in measured.repeat_rows.tolist()])
    names = names[held.fold[measured.repeat_rows] >= 0]
    rows = []
    for name, part in [*((n, names == n) for n in COLOURS), ("all", np.ones(len(names), dtype=bool))]:
        if part.any():
            found = bound(actual[part], upper[part], shares[part])
            rows.append([f"{name}, {company}", percent(found.coverage), percent(found.mean_excess), str(part.sum())])
    return rows


def calibration(measured: Measured, held: Held, levels: Floats) -> Floats:
    """Share of repeats under the prediction times the quantile of the *other* folds' residuals: float64[levels]."""
    row = measured.repeat_rows
    about = held.fold[row] >= 0
    residuals, fold = np.log(measured.repeat_seconds[about] / held.predicted[row[about]]), held.fold[row[about]]
    covered = np.zeros(len(levels))
    for number in np.unique(fold):
        limits = np.quantile(residuals[fold != number], levels)
        covered += (residuals[fold == number, None] <= limits).sum(axis=0)
    return covered / len(residuals)


def _calibration(axis: Axes, measured: Measured, helds: Mapping[str, Held]) -> None:
    axis.plot([50, 100], [50, 100], color=INK, linewidth=0.8)
    for test, held in helds.items():
        found = calibration(measured, held, _LEVELS)
        axis.plot(100 * _LEVELS, 100 * found, marker="o", markersize=4, color=_TESTS[test], label=COMPANY[test])
    axis.set(xlabel="nominal quantile (%)", ylabel="repeats covered (%)", title="Calibration", xlim=(48, 101))
    axis.grid()
    axis.legend()


def _excess(axis: Axes, measured: Measured, helds: Mapping[str, Held]) -> None:
    edges = np.linspace(-20.0, _WIDEST, 41)
    for test, held in helds.items():
        actual, upper, shares = repeat_bounds(measured, held)
        excess = np.clip(100.0 * (upper / actual - 1.0), edges[0], edges[-1])
        weights = 100.0 * shares / shares.sum()
        axis.hist(excess, edges.tolist(), weights=weights, histtype="step", color=_TESTS[test], label=COMPANY[test])
    axis.axvline(0.0, color=INK, linewidth=0.8)
    axis.set(xlabel="bound over single run (% excess)", ylabel="repeats (%)", title="Excess of the bounds")
    axis.legend()


def published(judgement: Judgement, noise: Mapping[str, Any]) -> Section:
    """Ours and the published forms on the same folds, as a table and as bars."""
    names = list(judgement.trials)
    head = [
        "",
        *(f"{c}: {figure}" for c in (COMPANY["solo"], COMPANY["corun"]) for figure in ("median", "95th", "largest")),
    ]
    rows = [[name, *_errors(judgement, name)] for name in names]
    rows.append(["repeat noise of the machine", percent(noise["solo"]), "", "", percent(noise["corun"]), "", ""])
    blocks: list[Block] = [
        Text("Every estimator was fitted to the same points and judged on the same held-out ones."),
        Table(head, rows, "Absolute percentage error"),
    ]
    reasons = [f"{name}, {COMPANY[test]}: {why}" for name in names for test, why in judgement.reasons(name).items()]
    if reasons:
        blocks.append(Text("No figures: " + "; ".join(reasons) + "."))
    tests = [test for test in _TESTS if any(judgement.held(name, test) is not None for name in names)]
    if tests:

        def paint(axes: list[Axes]) -> None:
            for axis, test in zip(axes, tests, strict=True):
                _bars(axis, judgement, names, test)

        svg = draw("Errors of ours and of the published forms", paint, size=(4.8 * len(tests), 3.6), columns=len(tests))
        blocks.append(Drawing(svg, "Bars: median error. Lines above them: 95th percentile. Logarithmic."))
    return Section("Published forms side by side", blocks)


def _errors(judgement: Judgement, name: str) -> Sequence[str]:
    cells: list[str] = []
    for test in _TESTS:
        found = judgement.errors(name, test) or {}
        cells += [percent(found.get(figure)) for figure in ("median_ape", "p95_ape", "max_ape")]
    return cells


def _bars(axis: Axes, judgement: Judgement, names: Sequence[str], test: str) -> None:
    for place, name in enumerate(names):
        found = judgement.errors(name, test)
        if found is not None:
            median, p95 = 100.0 * found["median_ape"], 100.0 * found["p95_ape"]
            axis.bar(place, median, width=0.6, color="#009E73" if name == OURS else "#999999")
            axis.plot([place, place], [median, p95], color=INK, linewidth=1.0)
            axis.plot([place - 0.15, place + 0.15], [p95, p95], color=INK, linewidth=1.0)
    axis.set_xticks(range(len(names)), names, rotation=20)
    axis.set(yscale="log", ylabel="error (%)", title=f"Forwards {COMPANY[test]}")
    axis.grid(axis="y")
