"""What a person reads of a fit: our errors beside the machine's noise and the published forms."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from smpart.bench.judgement import OURS

_TESTS = {"solo": "alone", "corun": "beside a neighbour", "scaling": "units left out"}
_MISSING = {"median_ape": None, "p95_ape": None, "max_ape": None}


def show(report: Mapping[str, Any], console: Console, say: Callable[[str], None]) -> None:
    """All of it."""
    console.print(table(report))
    for line in lines(report):
        say(line)


def table(report: Mapping[str, Any]) -> Table:
    """One row an estimator and test: median, 95th percentile and largest held-out error, in percent."""
    title = f"held-out errors over {report['points']} points"
    view = Table(title=title, title_justify="left", title_style="bold", header_style="bold")
    for name in ("", "", "median", "95th", "largest", "points"):
        view.add_column(name, justify="left" if not name else "right")
    for name, figures in ((OURS, report), *report["baselines"].items()):
        for test, company in _TESTS.items():
            found = figures[test] or _MISSING
            cells = (_percent(found[key]) for key in _MISSING)
            view.add_row(name, company, *cells, str(found.get("cases", "-")))
        view.add_section()
    for test in ("solo", "corun"):
        view.add_row("repeat noise", _TESTS[test], _percent(report["repeat_noise"][test]))
    return view


def lines(report: Mapping[str, Any]) -> list[str]:
    """What the table has no room for: the bound, the tables, the artefact, and why figures are missing."""
    found = report["bound"]
    said = [f"{_TESTS[test]}: no figures ({why})" for test, why in report["reasons"].items()]
    if found is not None:
        said.append(
            f"{found['coverage']:.2%} of single runs are under their bound, which exceeds them by "
            f"{found['mean_excess']:.1%} on average"
        )
        floor = [f"{excess:.1%} {_TESTS[test]}" for test, excess in report["repeat_noise"]["bound"].items() if excess]
        if floor:
            said.append(f"a bound that knew every median and covered 99 %: {', '.join(floor)} (the machine's noise)")
    off = report["tables"]["max_deviation"]
    if off is not None:
        said.append(f"the compiled tables are within {off:.2%} of the estimator")
    return [*said, f"artefact: {report['artefact']}"]


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.2f} %"
