"""Every policy on the same simulated engine: capacity over models, GPUs, traces and objectives.

Capacity is the highest rate at which 90 % of all requests meet every objective and the queue does not grow, searched
for each policy on the same windows of the trace. Objectives are those of `smpart.bench.study`. Cells that are in the
output file already are not run again. Policies that predict do so from a profile that `smpart profile` would make,
corrected as they go. Reads the traces of the data folder (``SMPART_DATA``).

    python examples/policy_shootout.py --quick
    python examples/policy_shootout.py --out out/policy_shootout.json
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from smpart.bench.host import host
from smpart.bench.plots import figure
from smpart.bench.study import OBJECTIVES, TRACES, Cell, Study, geometric, profiled
from smpart.durable import write_whole

PLACES = (
    ("llama-3.1-8b", "a100"),
    ("llama-3.1-8b", "h100"),
    ("qwen3-32b-fp8", "h200"),
    ("llama-3.1-70b-fp8", "h200"),
)
OURS = "smpart"
RIVALS = (
    "mixed", "chunked", "chunked+slack", "static:75/25", "static:50/50", "pdmux", "muxwise", "bullet", "nexus",
    "semipd", "duet",
)  # fmt: skip
"""``static:P/D`` are shares in percent; the better one of them is what a static split is worth."""
QUICK = (Cell("llama-3.1-8b", "h100", "azure-conv", "tight"), Cell("llama-3.1-8b", "a100", "azure-code", "loose"))
LEAST = 0.98
"""Share of the best rival's capacity below which a cell is listed as lost."""


def run_cell(
    cell: Cell, policies: tuple[str, ...], profiles: Path, requests: int, windows: int, contention: float
) -> dict[str, Any]:
    """Every policy's capacity in a cell, with the record of the run at it."""
    started = time.monotonic()
    predicts = profiled(cell.model, cell.gpu, profiles, contention)
    study = Study(cell, requests, windows, contention, predicts=predicts)
    runs: dict[str, Any] = {}
    guess = study.guess
    for policy in policies:
        runs[policy] = study.capacity(policy, guess).record
        guess = runs[policy]["capacity_rps"] or guess
    seconds = round(time.monotonic() - started, 1)
    return {"name": cell.name, **asdict(cell), "slo": asdict(study.slo), "seconds": seconds, "runs": runs}


def capacities(cell: dict[str, Any]) -> dict[str, float]:
    """By policy, static splits put together under the best of them."""
    found = {policy: float(run["capacity_rps"]) for policy, run in cell["runs"].items()}
    static = [found.pop(policy) for policy in list(found) if policy.startswith("static:")]
    return {**found, "static (best)": max(static)} if static else found


def summary(cells: list[dict[str, Any]]) -> dict[str, Any]:
    """Ratios of capacity over the cells that anybody can hold at all, and the cells where ours is not the best.

    Where a rival holds no rate at all the ratio is infinite: such cells are counted and left out of the means.
    """
    over: dict[str, list[float]] = {}
    best, tight, lost = [], [], []
    for cell in cells:
        rivals = capacities(cell)
        ours = rivals.pop(OURS, 0.0)
        if not rivals or not max(ours, *rivals.values()):
            continue
        for policy, rate in rivals.items():
            over.setdefault(policy, []).append(ours / rate if rate else math.inf)
        rival = max(rivals, key=lambda policy: rivals[policy])
        best.append(ours / rivals[rival] if rivals[rival] else math.inf)
        if cell["objective"] == "tight" and rivals.get("chunked"):
            tight.append(ours / rivals["chunked"])
        if best[-1] < LEAST:
            lost.append({"cell": cell["name"], "rival": rival, "ratio": round(best[-1], 3)})
    return {
        "cells": len(cells),
        "held_by_nobody": len(cells) - len(best),
        "over_best_rival": geometric(best),
        "over_chunked_where_tight": round(sum(tight) / len(tight), 3) if tight else None,
        "over": {policy: geometric(ratios) for policy, ratios in sorted(over.items())},
        "infinite": {policy: sum(map(math.isinf, ratios)) for policy, ratios in sorted(over.items())},
        "lost": lost,
    }


def line(cell: dict[str, Any]) -> str:
    """A cell in a line: capacities in requests a second, the best first."""
    ranked = sorted(capacities(cell).items(), key=lambda item: -item[1])
    told = ", ".join(f"{policy} {rate:.3g}" for policy, rate in ranked)
    slo = cell["slo"]
    return f"{cell['name']} (TTFT {slo['ttft_ms']:g}, TPOT {slo['tpot_ms']:g} ms): {told} [{cell['seconds']:.0f} s]"


def draw(cells: list[dict[str, Any]], path: Path) -> None:
    """Each rival's capacity over ours, a dot a cell."""
    canvas, (axis,) = figure(1, [1.0], (9, 4.5))
    shares: dict[str, list[float]] = {}
    for cell in cells:
        rivals = capacities(cell)
        if ours := rivals.pop(OURS, 0.0):
            for policy, rate in rivals.items():
                shares.setdefault(policy, []).append(rate / ours)
    for place, (_, values) in enumerate(sorted(shares.items())):
        spread = [place + 0.5 * (k / max(1, len(values) - 1) - 0.5) for k in range(len(values))]
        axis.plot(spread, values, ".", color="#0072B2", markersize=6)
    axis.axhline(1.0, color="#D55E00", linewidth=1)
    axis.set_xticks(range(len(shares)), sorted(shares), rotation=30, ha="right")
    axis.set_ylabel("capacity over smpart's")
    canvas.suptitle("A dot is a cell: model, GPU, trace, objective", fontsize=11, x=0.01, ha="left")
    canvas.savefig(path)


def main() -> None:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/policy_shootout.json"))
    parser.add_argument("--profiles", type=Path, default=Path("out/profiles"), help="made there if they are missing")
    parser.add_argument("--jobs", type=int, default=2, help="cells at a time")
    parser.add_argument("--requests", type=int, default=300, help="requests of one replay")
    parser.add_argument("--windows", type=int, default=1, help="windows of the trace that each rate is tried on")
    parser.add_argument("--contention", type=float, default=1.0, help="multiplies slowdowns beside a neighbour")
    parser.add_argument("--policies", default=",".join((OURS, *RIVALS)))
    parser.add_argument("--cells", default="", help="only cells whose name holds each of these words, joined by +")
    parser.add_argument("--quick", action="store_true", help="two cells, four policies, 100 requests")
    asked = parser.parse_args()
    every = [Cell(*place, trace, kind) for kind, trace, place in itertools.product(OBJECTIVES, TRACES, PLACES)]
    cells = [cell for cell in every if all(word in cell.name for word in asked.cells.split("+"))]
    policies, requests = tuple(asked.policies.split(",")), asked.requests
    if asked.quick:
        cells, policies, requests = list(QUICK), (OURS, "chunked", "chunked+slack", "static:50/50"), 100
    done: list[dict[str, Any]] = json.loads(asked.out.read_text())["cells"] if asked.out.exists() else []
    todo = [cell for cell in cells if cell.name not in {known["name"] for known in done}]
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    plan = {"requests": requests, "windows": asked.windows, "contention": asked.contention}
    with ProcessPoolExecutor(asked.jobs, mp_context=get_context("forkserver")) as pool:
        places = {(cell.model, cell.gpu) for cell in todo}  # each is profiled once, before anybody needs it
        made = [pool.submit(profiled, *place, asked.profiles, asked.contention) for place in sorted(places)]
        print(f"profiles: {', '.join(done.result() for done in made)}", flush=True)
        running = [pool.submit(run_cell, cell, policies, asked.profiles, *plan.values()) for cell in todo]
        for ended in as_completed(running):
            done.append(ended.result())
            print(line(done[-1]), flush=True)
            results = {"schema": 1, "host": host(), "plan": plan, "summary": summary(done), "cells": done}
            write_whole(asked.out, json.dumps(results, indent=1).encode() + b"\n")
    draw(done, asked.out.with_suffix(".png"))
    print(json.dumps(summary(done), indent=1))


if __name__ == "__main__":
    main()
