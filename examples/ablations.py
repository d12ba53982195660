"""What each part of the controller is worth: capacity without it, over capacity with everything.

python examples/ablations.py --quick
python examples/ablations.py --out out/ablations.json
"""

from __future__ import annotations

import argparse
import json
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from smpart.bench.handicaps import Unguarded, Unlearning
from smpart.bench.host import host
from smpart.bench.plots import figure
from smpart.bench.study import Cell, Handicap, Study, geometric, profiled
from smpart.durable import write_whole
from smpart.engine.deployment import Deployment
from smpart.predictor import OnlinePredictor, RooflinePrior

CELLS = (
    Cell("llama-3.1-8b", "h100", "azure-conv", "tight"),
    Cell("llama-3.1-8b", "a100", "azure-conv", "papers"),
    Cell("llama-3.1-8b", "a100", "azure-code", "loose"),
    Cell("llama-3.1-8b", "h100", "mooncake-synth", "papers"),
    Cell("qwen3-32b-fp8", "h200", "arxiv", "tight"),
)


def physics(deployment: Deployment) -> Unlearning:
    """Data-sheet physics, never corrected."""
    return Unlearning(RooflinePrior(deployment.model_shape, deployment.lanes.device))


def uncorrected(deployment: Deployment) -> Unlearning:
    """The profile, never corrected."""
    return Unlearning(deployment.predictor.prior)


def unprofiled(deployment: Deployment) -> OnlinePredictor:
    """Physics, corrected from a cold start."""
    return OnlinePredictor(RooflinePrior(deployment.model_shape, deployment.lanes.device))


def unguarded(deployment: Deployment) -> Unguarded:
    """No upper bounds."""
    return Unguarded(deployment.predictor.prior)


VARIANTS: dict[str, tuple[str, Handicap | None]] = {
    "everything": ("smpart", None),
    "no estimator": ("smpart", physics),
    "no profile": ("smpart", unprofiled),
    "no correction": ("smpart", uncorrected),
    "no guard": ("smpart", unguarded),
    "no preemption": ("smpart:no-preemption", None),
    "no slack": ("smpart:no-slack", None),
    "fixed split 75/25": ("smpart:split=75/25", None),
    "fixed split 50/50": ("smpart:split=50/50", None),
    **{f"every {period} ms": (f"smpart:period={period}", None) for period in (1, 5, 20, 100)},
}
"""By name: the policy (splits in percent), and what is done to its predictor. The line otherwise moves at any event."""


def run(cell: Cell, variant: str, requests: int, profiles: Path) -> tuple[Cell, str, dict[str, Any]]:
    """One variant's capacity in a cell."""
    policy, handicap = VARIANTS[variant]
    study = Study(cell, requests, handicap=handicap, predicts=profiled(cell.model, cell.gpu, profiles))
    name, found, shares = policy.partition("split=")
    return cell, variant, study.capacity(f"{name}{found}{study.nearest(shares)}" if found else policy).record


def summary(found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """By variant: capacity over that with everything, geometric mean over cells, least and greatest."""
    ratios: dict[str, list[float]] = {}
    for records in found.values():
        whole = records["everything"]["capacity_rps"]
        for variant, record in records.items():
            ratios.setdefault(variant, []).append(record["capacity_rps"] / whole if whole else float("nan"))
    return {v: {"mean": geometric(r), "least": min(r), "greatest": max(r)} for v, r in ratios.items()}


def draw(told: dict[str, Any], path: Path) -> None:
    """A bar a variant, with its range over cells."""
    canvas, (axis,) = figure(1, [1.0], (8, 4.5))
    names = list(told)[::-1]
    means = [told[name]["mean"] or 0.0 for name in names]
    below = [max(0.0, mean - told[name]["least"]) for name, mean in zip(names, means, strict=True)]
    above = [max(0.0, told[name]["greatest"] - mean) for name, mean in zip(names, means, strict=True)]
    axis.barh(names, means, xerr=(below, above), color="#0072B2", ecolor="#222222", capsize=3)
    axis.axvline(1.0, color="#D55E00", linewidth=1)
    axis.set_xlabel("capacity over that with everything (bar: geometric mean over cells, whisker: range)")
    canvas.savefig(path)


def main() -> None:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/ablations.json"))
    parser.add_argument("--profiles", type=Path, default=Path("out/profiles"), help="made there if they are missing")
    parser.add_argument("--jobs", type=int, default=2, help="searches at a time")
    parser.add_argument("--requests", type=int, default=300, help="requests of one replay")
    parser.add_argument("--quick", action="store_true", help="one cell, four variants, 100 requests")
    asked = parser.parse_args()
    cells, variants, requests = CELLS, list(VARIANTS), asked.requests
    if asked.quick:
        cells, variants, requests = CELLS[:1], ["everything", "no estimator", "no slack", "every 100 ms"], 100
    found: dict[str, dict[str, Any]] = {cell.name: {} for cell in cells}
    with ProcessPoolExecutor(asked.jobs, mp_context=get_context("forkserver")) as pool:
        for place in sorted({(cell.model, cell.gpu) for cell in cells}):
            print(f"profile: {profiled(*place, asked.profiles)}", flush=True)
        asking = [(cell, variant) for cell in cells for variant in variants]
        running = [pool.submit(run, *each, requests, asked.profiles) for each in asking]
        for ended in as_completed(running):
            cell, variant, record = ended.result()
            found[cell.name][variant] = record
            print(f"{cell.name}: {variant} {record['capacity_rps']:.3g} req/s", flush=True)
    found = {name: {variant: records[variant] for variant in variants} for name, records in found.items()}
    told = summary(found)
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    results = {"schema": 1, "host": host(), "requests": requests, "summary": told, "cells": found}
    write_whole(asked.out, json.dumps(results, indent=1).encode() + b"\n")
    draw(told, asked.out.with_suffix(".png"))
    print(json.dumps(told, indent=1))


if __name__ == "__main__":
    main()
