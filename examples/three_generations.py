"""Three ways to serve two phases, in one table: together on one GPU, on two GPUs, side by side on one GPU.

Latencies are taken at the same load per GPU, a share of what smpart holds, on the first window; capacities are searched
for each, on all.

* isolation: the longest gap between tokens that 99 of 100 gaps stay below, over the median gap. Prompts of others
  lengthen gaps: 1 means that readers do not notice them.
* cost: GPUs for 100 requests a second that meet every objective.
* moved: KV bytes that cross a link for each request.

    python examples/three_generations.py --quick
    python examples/three_generations.py --out out/three_generations.json
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.table import Table

from smpart.bench.plots import figure, save
from smpart.bench.questions import Answer, Question, inquiry, parser, size
from smpart.bench.study import Cell
from smpart.sim import DIMENSIONS

NAME = "three_generations"
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


@dataclass(frozen=True, kw_only=True)
class Capacity(Question):
    """What does smpart hold here?"""

    def answer(self, profiles: Path) -> Answer:
        """The record of the run at its capacity."""
        return self.study(profiles).capacity("smpart").record

    def line(self, answer: Answer) -> str:
        """The capacity."""
        return f"{self.cell.name}: smpart holds {answer['capacity_rps']:.3g} req/s"


@dataclass(frozen=True, kw_only=True)
class Row(Question):
    """What does a policy hold, and how does it fare at `load` requests a second and GPU?"""

    policy: str
    load: float

    def answer(self, profiles: Path) -> Answer:
        """A row of the table."""
        study = self.study(profiles)
        held = study.capacity(self.policy, self.load).record
        gpus = int(str(held["gpus"]))
        made = study.at(self.policy, self.load * gpus)
        record: Any = made.record
        prompts = [served.prompt_tokens for served in made.replay.served]
        moved = DIMENSIONS[self.cell.model].shape.kv_token_bytes * sum(prompts) / len(prompts) if gpus > 1 else 0.0
        capacity = float(str(held["capacity_per_gpu_rps"]))
        return {
            "policy": self.policy,
            "generation": GENERATIONS[self.policy],
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

    def line(self, answer: Answer) -> str:
        """What it holds."""
        return f"{self.cell.name}: {self.policy} holds {answer['capacity_per_gpu_rps']:.3g} req/s a GPU"


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
    save(canvas, path)


def main() -> None:
    """Run what was asked for."""
    asked = parser(__doc__, NAME, jobs="policies", quick="one cell, 80 requests").parse_args()
    cells, scope = CELLS[:1] if asked.quick else CELLS, size(asked, 80)
    found: dict[str, list[dict[str, Any]]] = {}
    with inquiry(asked, NAME) as survey:
        capacities = survey.ask([Capacity(cell=cell, **scope) for cell in cells])
        for cell, held in zip(cells, capacities, strict=True):
            load = SHARE * float(held["capacity_rps"])
            ask = partial(Row, cell=cell, load=load, **scope)
            rows = [ask(policy=policy) for policy in GENERATIONS]
            found[cell.name] = survey.ask(rows)
            survey.show(table(cell, found[cell.name], load))
        tables = {name: [{k: v for k, v in row.items() if k != "run"} for row in rows] for name, rows in found.items()}
        survey.finish({"share": SHARE, "cells": tables}, lambda path: draw(found, path))


if __name__ == "__main__":
    main()
