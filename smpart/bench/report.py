"""Run records as a table, JSON and Parquet, with the configuration beside them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from rich.table import Table

from smpart.bench.metrics import itl_ms, met, tpot_ms, ttft_ms
from smpart.bench.run import Run
from smpart.errors import BackendUnavailable

Record = Mapping[str, Any]

_PER_GPU: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("GPUs", ("gpus",), ""),
    ("goodput per GPU", ("goodput_per_gpu_rps",), "req/s"),
    ("capacity per GPU", ("capacity_per_gpu_rps",), "req/s"),
)
"""Shown where a run used several."""

_BEST_EFFORT: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("best-effort requests", ("best_effort", "requests"), ""),
    ("best-effort throughput", ("best_effort", "throughput_tok_s"), "tok/s"),
)
"""Shown where there are any."""

_ROWS: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("requests", ("requests",), ""),
    ("refused", ("refused",), ""),
    ("TTFT p50", ("ttft_ms", "p50"), "ms"),
    ("TTFT p95", ("ttft_ms", "p95"), "ms"),
    ("TPOT p50", ("tpot_ms", "p50"), "ms"),
    ("TPOT p95", ("tpot_ms", "p95"), "ms"),
    ("ITL p50", ("itl_ms", "p50"), "ms"),
    ("ITL p99", ("itl_ms", "p99"), "ms"),
    ("ITL max", ("itl_ms", "max"), "ms"),
    ("met every objective", ("slo_attainment",), "%"),
    ("goodput", ("goodput_rps",), "req/s"),
    ("capacity", ("capacity_rps",), "req/s"),
    *_PER_GPU,
    ("throughput", ("throughput_tok_s",), "tok/s"),
    *_BEST_EFFORT,
    ("bubble, prefill lane", ("bubble", "prefill"), "%"),
    ("bubble, decode lane", ("bubble", "decode"), "%"),
    ("moves of the line", ("resizes",), ""),
)


class Cell(NamedTuple):
    """The median over a policy's runs, and their lowest and highest ("" where there is one run only)."""

    middle: str
    spread: str


def rows(records: Sequence[Record]) -> tuple[list[str], list[tuple[str, str, list[Cell | None]]]]:
    """Policies, and for each figure that any of them has: its name, its unit, and a cell a policy."""
    policies = list(dict.fromkeys(str(r["policy"]) for r in records))
    hidden = () if any(r.get("gpus", 1) > 1 for r in records) else _PER_GPU
    hidden += () if any(r.get("best_effort") for r in records) else _BEST_EFFORT
    found = []
    for name, path, unit in (row for row in _ROWS if row not in hidden):
        cells = [_cell([_dig(r, path) for r in records if r["policy"] == policy], unit) for policy in policies]
        if any(cells):
            found.append((name, unit, cells))
    return policies, found


def by_rate(records: Sequence[Record]) -> list[tuple[float | None, list[Record]]]:
    """The records rate by rate, where every policy was run at the same several rates; else all together."""
    rates = list(dict.fromkeys(record["rate"] for record in records))
    parts = [[record for record in records if record["rate"] == rate] for rate in rates]
    policies = {record["policy"] for record in records}
    if len(parts) == 1 or any({record["policy"] for record in part} != policies for part in parts):
        return [(None, list(records))]
    return list(zip(rates, parts, strict=True))


def table(records: Sequence[Record], title: str) -> Table:
    """One column a policy: the median over its runs, with the lowest and highest where there are several."""
    policies, figures = rows(records)
    view = Table(title=title, title_justify="left", title_style="bold", header_style="bold")
    view.add_column("")
    for policy in policies:
        view.add_column(policy, justify="right")
    view.add_column("")
    for name, unit, cells in figures:
        view.add_row(name, *(_marked(cell) for cell in cells), f"[dim]{unit}[/dim]")
    return view


def document(command: str, host: Record, runs: Sequence[Record], **more: object) -> dict[str, object]:
    """What ``--json`` prints and ``results.json`` holds."""
    return {"schema": 1, "command": command, "host": dict(host), "runs": list(runs), **more}


def write(folder: Path, results: Mapping[str, object], runs: Sequence[Run], config: Mapping[str, object]) -> list[Path]:
    """Write ``config.json``, ``results.json`` and ``requests.parquet`` (one row a request); the paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / "config.json", folder / "results.json", folder / "requests.parquet"]
    paths[0].write_text(json.dumps(config, indent=2) + "\n")
    paths[1].write_text(json.dumps(results, indent=2) + "\n")
    pandas().DataFrame([row for run in runs for row in _rows(run)]).to_parquet(paths[2], index=False)
    return paths


def _rows(run: Run) -> list[dict[str, object]]:
    return [
        {
            "policy": run.policy,
            "seed": run.seed,
            "rate": run.record["rate"],
            "request": s.index,
            "due_s": s.due_s,
            "prompt_tokens": s.prompt_tokens,
            "max_tokens": s.max_tokens,
            "output_tokens": len(s.token_ids),
            "cached_tokens": s.cached_tokens,
            "preemptions": s.preemptions,
            "best_effort": s.best_effort,
            "finish_reason": s.reason.value,
            "error": s.error,
            "ttft_ms": ttft_ms(s),
            "tpot_ms": tpot_ms(s),
            "itl_max_ms": max(itl_ms(s), default=None),
            "met_slo": met(s, run.slo),
            "token_times_s": list(s.times_s),
        }
        for s in run.replay.served
    ]


def pandas() -> Any:
    """The package, with a Parquet engine. Raises `BackendUnavailable` if either is missing."""
    try:
        import pandas
        import pyarrow  # noqa: F401
    except ImportError as error:
        raise BackendUnavailable(f"{error.name} is missing: pip install 'smpart[bench]'") from None
    return pandas


def _dig(record: Record, path: tuple[str, ...]) -> float | None:
    value: Any = record
    for key in path:
        value = None if value is None else value[key]
    return value  # type: ignore[no-any-return]


def _cell(values: Sequence[float | None], unit: str) -> Cell | None:
    known = [v * 100 if unit == "%" else v for v in values if v is not None]
    if not known:
        return None
    return Cell(_number(median(known)), f"{_number(min(known))} to {_number(max(known))}" if len(known) > 1 else "")


def _marked(cell: Cell | None) -> str:
    if cell is None:
        return "-"
    return f"{cell.middle} [dim]({cell.spread})[/dim]" if cell.spread else cell.middle


def _number(value: float) -> str:
    """Three significant digits without an exponent."""
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.3g}"
