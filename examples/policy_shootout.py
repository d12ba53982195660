"""Every policy on the same simulated engine: capacity over models, GPUs, traces and objectives.

Capacity is the highest rate at which 90 % of all requests meet every objective and the queue does not grow, searched
for each policy on the same windows of the trace. Objectives, all with gaps between tokens of at most twice the TPOT:

* ``papers``: TTFT 200 ms, TPOT 50 ms; where a prompt of the 90th percentile takes longer than half of that, twice what
  it takes on the whole GPU (one that nobody can hold tells nothing).
* ``tight``: TPOT 1.5 times a decode step of 32 sequences alone on the whole GPU (Sarathi, section 5.1, states multiples
  of a step), TTFT twice the prefill of a prompt of the 90th percentile alone, but at least 200 ms.
* ``loose``: 5 times the step, 5 times the prefill.

Cells that are in the output file already are not run again.

    python examples/policy_shootout.py --quick
    python examples/policy_shootout.py --out out/shootout.json --jobs 2
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from smpart.bench.bench import Bench, Options, Watch
from smpart.bench.capacity import at_capacity
from smpart.bench.crew import Alone
from smpart.bench.host import host
from smpart.bench.load import Load
from smpart.bench.source import TraceOptions, open_load
from smpart.durable import write_whole
from smpart.engine.deployment import Deployment
from smpart.partition import Shape
from smpart.scheduler.slo import SLO
from smpart.sim import DIMENSIONS, SiliconCost
from smpart.sim.published import data_file

PLACES = (
    ("llama-3.1-8b", "a100"),
    ("llama-3.1-8b", "h100"),
    ("qwen3-32b-fp8", "h200"),
    ("llama-3.1-70b-fp8", "h200"),
)
TRACES = {
    "azure-conv": "traces/AzureLLMInferenceTrace_conv.csv",
    "azure-code": "traces/AzureLLMInferenceTrace_code.csv",
    "mooncake-conv": "traces/mooncake_conversation_trace.jsonl",
    "mooncake-synth": "traces/mooncake_synthetic_trace.jsonl",
    "arxiv": "traces/arxiv_summarization_lengths.csv",
}
OBJECTIVES = ("papers", "tight", "loose")
RIVALS = (
    "mixed", "chunked", "chunked+slack", "static:75/25", "static:50/50", "pdmux", "muxwise", "bullet", "nexus",
    "semipd", "duet",
)  # fmt: skip
"""``static:P/D`` are shares in percent here; the better one of them is what a static split is worth."""
OURS = "smpart"


@dataclass(frozen=True)
class Cell:
    """One question: which policy has the highest capacity here."""

    model: str
    gpu: str
    trace: str
    objective: str

    @property
    def name(self) -> str:
        """As results are kept under."""
        return f"{self.model} on {self.gpu}, {self.trace}, {self.objective}"


@dataclass(frozen=True)
class Plan:
    """How much of it to run.

    Attributes:
        requests: of one replay.
        windows: of the trace, each that long; a rate is tried on all of them.
        contention: what the simulator's slowdowns beside a neighbour are multiplied by.
    """

    policies: tuple[str, ...]
    requests: int
    windows: int
    contention: float


def run_cell(cell: Cell, plan: Plan) -> dict[str, Any]:
    """Capacity of every policy in a cell, with the record of the run at it."""
    started = time.monotonic()
    worse = "" if plan.contention == 1.0 else f"~{plan.contention:g}"
    source = TraceOptions(str(data_file(TRACES[cell.trace])), limit=plan.requests, clip=True)
    backend, dtype = f"sim:{cell.gpu}{worse}", "bfloat16"
    with Deployment.open(cell.model, backend=backend, dtype=dtype, profile="none") as deployment:
        load = open_load(source, deployment.max_len, plan.requests)
        slo, guess = demands(cell, load)
        splits = deployment.lanes.splits()
        named = {policy: _static(policy, splits) for policy in plan.policies}
        runs: dict[str, Any] = {}
        for policy, spec in named.items():
            options = Options((spec,), source, slo, (guess,), repeat=plan.windows, capacity=True, jobs=1)
            bench = Bench(deployment, options, _silent, _unwatched)
            (run,) = at_capacity(bench, Alone(bench, _silent), _silent)
            runs[policy] = run.record
            guess = run.record["capacity_rps"] or guess
    return {**asdict(cell), "slo": asdict(slo), "seconds": round(time.monotonic() - started, 1), "runs": runs}


def demands(cell: Cell, load: Load) -> tuple[SLO, float]:
    """The objectives of a cell, and a rate to begin with: what the whole GPU takes for a mean request, twice."""
    model = DIMENSIONS[cell.model]
    cost, units = SiliconCost(model, cell.gpu), _units(cell.gpu)
    prompts = np.array([a.prompt_tokens for a in load.arrivals])
    outputs = np.array([a.output_tokens for a in load.arrivals])

    def alone(shape: Shape) -> float:
        return cost(shape, units, Shape(), 0)

    long, mean = (int(x) for x in (np.percentile(prompts, 90), prompts.mean()))
    step = 1e3 * alone(Shape.decode(_BATCH, _BATCH * int(mean + outputs.mean() / 2)))
    prefill = 1e3 * alone(Shape.prefill([(long, 0)]))
    seconds = alone(Shape.prefill([(mean, 0)])) + outputs.mean() * step / 1e3 / _BATCH
    ttft, tpot = {
        "papers": (max(200.0, 2 * prefill), 50.0),
        "tight": (max(200.0, 2 * prefill), 1.5 * step),
        "loose": (max(200.0, 5 * prefill), 5 * step),
    }[cell.objective]
    return SLO(ttft_ms=float(f"{ttft:.3g}"), tpot_ms=float(f"{tpot:.3g}")), float(f"{0.5 / seconds:.3g}")


_BATCH = 32
"""Sequences of the decode step that objectives are multiples of."""


def _units(gpu: str) -> int:
    from smpart.partition.gpus import GPUS

    return GPUS[gpu].sms


def _static(policy: str, splits: Any) -> str:
    name, _, share = policy.partition(":")
    if name != "static":
        return policy
    wanted = float(share.partition("/")[0]) / 100
    proper = [split for split in splits if not split.exclusive]
    return f"static:{min(proper, key=lambda split: abs(split.prefill / split.total - wanted))}"


def _silent(line: str) -> None:
    pass


@contextmanager
def _unwatched(title: str) -> Iterator[Watch]:
    yield lambda status: None


# ---- what comes of it


def capacities(cell: dict[str, Any]) -> dict[str, float]:
    """By policy, static splits put together under the best of them."""
    found = {policy: float(run["capacity_rps"]) for policy, run in cell["runs"].items()}
    static = [found.pop(policy) for policy in list(found) if policy.startswith("static:")]
    return {**found, "static (best)": max(static)} if static else found


def summary(cells: list[dict[str, Any]]) -> dict[str, Any]:
    """Ratios of capacity over the cells that anybody can hold at all, and the cells where ours is not the best."""
    by_rival: dict[str, list[float]] = {}
    best: list[float] = []
    chunked: list[float] = []
    lost = []
    for cell in cells:
        found = capacities(cell)
        ours = found.pop(OURS, 0.0)
        if not found or not max(ours, *found.values()):
            continue
        for policy, rate in found.items():
            by_rival.setdefault(policy, []).append(ours / rate if rate else math.inf)
        rival = max(found, key=lambda policy: found[policy])
        best.append(ours / found[rival] if found[rival] else math.inf)
        if cell["objective"] == "tight" and found.get("chunked"):
            chunked.append(ours / found["chunked"])
        if found[rival] and best[-1] < 0.98:
            lost.append({"cell": _name(cell), "rival": rival, "ratio": round(best[-1], 3)})
    return {
        "cells": len(cells),
        "held_by_nobody": len(cells) - len(best),
        "over_best_rival": _geometric(best),
        "over_chunked_where_tight": round(float(np.mean(chunked)), 3) if chunked else None,
        "over": {policy: _geometric(ratios) for policy, ratios in sorted(by_rival.items())},
        "infinite": {policy: sum(map(math.isinf, ratios)) for policy, ratios in sorted(by_rival.items())},
        "below_98_percent": lost,
    }


def _geometric(ratios: list[float]) -> float | None:
    """Geometric mean of those that are finite and positive."""
    usable = [ratio for ratio in ratios if 0.0 < ratio < math.inf]
    return round(float(np.exp(np.mean(np.log(usable)))), 3) if usable else None


def _name(cell: dict[str, Any]) -> str:
    return Cell(*(cell[key] for key in ("model", "gpu", "trace", "objective"))).name


def line(cell: dict[str, Any]) -> str:
    """A cell in a line: capacities in requests a second, the best first."""
    ranked = sorted(capacities(cell).items(), key=lambda item: -item[1])
    told = ", ".join(f"{policy} {rate:.3g}" for policy, rate in ranked)
    slo = cell["slo"]
    return f"{_name(cell)} (TTFT {slo['ttft_ms']:g}, TPOT {slo['tpot_ms']:g}): {told} [{cell['seconds']:.0f} s]"


def main() -> None:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/policy_shootout.json"))
    parser.add_argument("--jobs", type=int, default=2, help="cells at a time")
    parser.add_argument("--requests", type=int, default=300, help="requests of one replay")
    parser.add_argument("--windows", type=int, default=1, help="windows of the trace that a rate is tried on")
    parser.add_argument("--contention", type=float, default=1.0, help="multiplies slowdowns beside a neighbour")
    parser.add_argument("--policies", default=",".join((OURS, *RIVALS)))
    parser.add_argument("--cells", default="", help="only cells whose name has this in it")
    parser.add_argument("--quick", action="store_true", help="two cells, four policies, 120 requests")
    asked = parser.parse_args()
    cells = [Cell(*place, trace, kind) for place, trace, kind in itertools.product(PLACES, TRACES, OBJECTIVES)]
    cells = [cell for cell in cells if all(part in cell.name for part in asked.cells.split("+"))]
    plan = Plan(tuple(asked.policies.split(",")), asked.requests, asked.windows, asked.contention)
    if asked.quick:
        cells = [Cell("llama-3.1-8b", "h100", trace, "tight") for trace in ("azure-conv", "azure-code")]
        plan = Plan((OURS, "chunked", "chunked+slack", "static:50/50"), 120, 1, asked.contention)
    done: list[dict[str, Any]] = json.loads(asked.out.read_text())["cells"] if asked.out.exists() else []
    known = {_name(cell) for cell in done}
    todo = [cell for cell in cells if cell.name not in known]
    with ProcessPoolExecutor(asked.jobs, mp_context=get_context("forkserver")) as pool:
        for ended in as_completed([pool.submit(run_cell, cell, plan) for cell in todo]):
            done.append(ended.result())
            print(line(done[-1]), flush=True)
            results = {"schema": 1, "host": host(), "plan": asdict(plan), "summary": summary(done), "cells": done}
            asked.out.parent.mkdir(parents=True, exist_ok=True)
            write_whole(asked.out, json.dumps(results, indent=1).encode())
    print(json.dumps(summary(done), indent=1))


if __name__ == "__main__":
    main()
