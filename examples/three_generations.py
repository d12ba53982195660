"""Three ways to serve two phases, in one table: together on one GPU, on two GPUs, side by side on one GPU.

Latencies are taken at the same load per GPU, a share of what smpart holds; capacities are searched for each.

* isolation: the longest gap between tokens that 99 of 100 gaps stay below, over the median gap. Prompts of others
  lengthen gaps: 1 means that readers do not notice them.
* cost: GPUs for 100 requests a second that meet every objective.
* moved: KV bytes that cross a link for each request.

    python examples/three_generations.py --quick
    python examples/three_generations.py --out out/three_generations.json
"""

from __future__ import annotations

import argparse
import json
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from smpart.bench.host import host
from smpart.bench.plots import figure
from smpart.bench.study import Cell, Study, profiled
from smpart.durable import write_whole
from smpart.sim import DIMENSIONS

CELLS = (
    Cell("llama-3.1-8b", "h100", "azure-conv", "papers"),
    Cell("llama-3.1-8b", "h100", "azure-conv", "tight"),
    Cell("llama-3.1-8b", "a100", "azure-code", "loose"),
)
GENERATIONS = {
    "mixed": "1: together, prefill first",
    "chunked": "1: together, prefill in chunks",
    "disagg": "2: a GPU for each phase",
    "overlap": "3: two streams, no line",
    "static:75/25": "3: a line that stands",
    "smpart": "3: a line that moves",
}
SHARE = 0.7
"""Of smpart's capacity, the load that latencies are compared at."""


def row(cell: Cell, policy: str, load: float, requests: int, predicts: str) -> dict[str, Any]:
    """What a policy holds, and how it fares at `load` requests a second and GPU."""
    study = Study(cell, requests, predicts=predicts)
    held = study.capacity(policy, load).record
    gpus = int(str(held["gpus"]))
    made = study.at(policy, load * gpus)
    record: Any = made.record
    prompts = [served.prompt_tokens for served in made.replay.served]
    moved = DIMENSIONS[cell.model].shape.kv_token_bytes * sum(prompts) / len(prompts) if gpus > 1 else 0.0
    capacity = float(str(held["capacity_per_gpu_rps"]))
    return {
        "policy": policy,
        "generation": GENERATIONS[policy],
        "gpus": gpus,
        "capacity_per_gpu_rps": capacity,
        "gpus_for_100_rps": 100.0 / capacity if capacity else None,
        "ttft_p95_ms": record["ttft_ms"]["p95"],
        "tpot_p50_ms": record["tpot_ms"]["p50"],
        "itl_p99_ms": record["itl_ms"]["p99"],
        "isolation": record["itl_ms"]["p99"] / record["itl_ms"]["p50"],
        "kv_bytes_moved": moved,
        "slo_attainment": record["slo_attainment"],
        "run": record,
    }


def table(cell: Cell, rows: list[dict[str, Any]], load: float) -> Table:
    """For people."""
    view = Table(title=f"{cell.name}; latencies at {load:.3g} req/s a GPU", title_justify="left")
    for name in ("generation", "policy", "GPUs", "TTFT p95", "TPOT p50", "ITL p99", "isolation", "met", "req/s/GPU",
                 "GPUs for 100/s", "KV moved"):  # fmt: skip
        view.add_column(name, justify="left" if name in ("generation", "policy") else "right")
    for r in rows:
        cost = "-" if r["gpus_for_100_rps"] is None else f"{r['gpus_for_100_rps']:.1f}"
        view.add_row(
            r["generation"], r["policy"], str(r["gpus"]), f"{r['ttft_p95_ms']:,.0f}", f"{r['tpot_p50_ms']:.1f}",
            f"{r['itl_p99_ms']:.1f}", f"{r['isolation']:.2f}", f"{r['slo_attainment']:.0%}",
            f"{r['capacity_per_gpu_rps']:.2f}", cost, f"{r['kv_bytes_moved'] / 1e6:,.0f} MB",
        )  # fmt: skip
    return view


def draw(cells: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """Capacity per GPU against how far prompts stretch gaps, a panel a cell."""
    canvas, axes = figure(len(cells), [1.0] * len(cells), (7, 3.2 * len(cells)), share=False)
    for axis, (name, rows) in zip(axes, cells.items(), strict=True):
        for r in rows:
            axis.plot(r["isolation"], r["capacity_per_gpu_rps"], "o", color="#0072B2")
            axis.annotate(r["policy"], (r["isolation"], r["capacity_per_gpu_rps"]), (5, 4), textcoords="offset points")
        axis.set_title(name, fontsize=10, loc="left")
        axis.set_ylabel("capacity, req/s a GPU")
        axis.set_ylim(bottom=0.0)
    axes[-1].set_xlabel("p99 gap over median gap (1: readers do not notice prompts)")
    canvas.savefig(path)


def main() -> None:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/three_generations.json"))
    parser.add_argument("--profiles", type=Path, default=Path("out/profiles"), help="made there if they are missing")
    parser.add_argument("--jobs", type=int, default=2, help="policies at a time")
    parser.add_argument("--requests", type=int, default=300, help="requests of one replay")
    parser.add_argument("--quick", action="store_true", help="one cell, 80 requests")
    asked = parser.parse_args()
    cells, requests = (CELLS[:1], 80) if asked.quick else (CELLS, asked.requests)
    found: dict[str, list[dict[str, Any]]] = {}
    with ProcessPoolExecutor(asked.jobs, mp_context=get_context("forkserver")) as pool:
        for cell in cells:
            predicts = profiled(cell.model, cell.gpu, asked.profiles)
            capacity = float(str(Study(cell, requests, predicts=predicts).capacity("smpart").record["capacity_rps"]))
            load = SHARE * capacity
            found[cell.name] = list(
                pool.map(partial(row, cell, load=load, requests=requests, predicts=predicts), GENERATIONS)
            )
            Console(width=max(Console().width, 160)).print(table(cell, found[cell.name], load))
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    results = {"schema": 1, "host": host(), "requests": requests, "share": SHARE, "cells": found}
    write_whole(asked.out, json.dumps(results, indent=1).encode() + b"\n")
    draw(found, asked.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
