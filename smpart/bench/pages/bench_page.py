"""The page of a bench folder: what `smpart bench --out` or `smpart demo` wrote."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from smpart.bench import report
from smpart.bench.pages.machine_parts import facts
from smpart.bench.pages.page import Block, Image, Page, Section, Table, Text
from smpart.errors import UsageError

RESULTS = "results.json"
_PICTURES = {
    "lanes.png": "What each unit did over time, the line between the lanes, and every gap between two tokens.",
    "goodput.png": "Requests a second that met every objective: the median of a policy's runs, and each run as a dot.",
    "latencies.png": "Share of requests (TTFT) and of gaps between tokens (ITL) up to each latency.",
}


def bench_page(folder: Path) -> Page:
    """A bench's page. Raises `UsageError` if its files are damaged or of another version of smpart."""
    results = _read(folder / RESULTS)
    runs: list[Mapping[str, Any]] = results["runs"]
    try:
        sections = [
            _comparison(runs, str(results.get("verdict") or "")),
            Section("Pictures", _pictures(folder)),
            Section("Every run", [_every_run(runs)]),
            Section("How it was run", _settings(folder, runs, results["host"])),
        ]
        first = runs[0]
        subtitle = f"{first['model']} on {first['backend']}, {first['trace']}, {len(runs)} runs"
    except (KeyError, TypeError, IndexError, ValueError) as error:
        raise UsageError(f"{folder / RESULTS} is of another version of smpart ({error!r}): run it again") from None
    return Page(f"smpart {results.get('command', 'bench')}", subtitle, sections)


def _read(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError):
        raise UsageError(f"{path} cannot be read: run the bench again with --out {path.parent}") from None
    if not isinstance(value, dict) or value.get("schema") != 1 or not isinstance(value.get("runs"), list):
        raise UsageError(f"{path} was not written by this version of smpart bench: run it again")
    return value


def _comparison(runs: Sequence[Mapping[str, Any]], verdict: str) -> Section:
    blocks: list[Block] = [Text(verdict)] if verdict else []
    for rate, records in report.by_rate(runs):
        policies, figures = report.rows(records)
        rows = []
        for name, unit, cells in figures:
            shown = ("–" if c is None else f"{c.middle} ({c.spread})" if c.spread else c.middle for c in cells)  # noqa: RUF001
            rows.append([name, *shown, unit])
        at = "" if rate is None else f"At {rate:g} requests a second. "
        caption = f"{at}Median over a policy's runs, with the lowest and highest where there are several"
        blocks.append(Table(["", *policies, ""], rows, caption))
    return Section("The policies compared", blocks)


def _pictures(folder: Path) -> list[Block]:
    found: list[Block] = [Image(folder / name, text) for name, text in _PICTURES.items() if (folder / name).is_file()]
    return found or [Text("The folder holds no pictures.")]


def _every_run(runs: Sequence[Mapping[str, Any]]) -> Table:
    head = ["policy", "seed", "rate (req/s)", "requests", "refused", "met every objective", "goodput (req/s)"]
    rows = [
        [
            str(run["policy"]),
            str(run["seed"]),
            "all at once" if run["rate"] is None else f"{run['rate']:.4g}",
            str(run["requests"]),
            str(run["refused"]),
            f"{run['slo_attainment']:.1%}",
            f"{run['goodput_rps']:.4g}",
        ]
        for run in runs
    ]
    return Table(head, rows)


def _settings(folder: Path, runs: Sequence[Mapping[str, Any]], host: Mapping[str, Any]) -> list[Block]:
    blocks: list[Block] = [facts(runs[0]["slo"], "Objectives (ms)")]
    if (folder / "config.json").is_file():
        config = json.loads((folder / "config.json").read_bytes())
        blocks.append(facts(config, "Configuration"))
    return [*blocks, facts(host, "Host")]
