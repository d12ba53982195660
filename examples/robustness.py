"""What is left of smpart's attainment when its predictor is wrong, arrivals come in bursts, or the traffic changes.

Everything is run at one share of smpart's own capacity on the undisturbed load, chunked prefill and a fixed split
beside it. On other loads that share is of the rate that keeps the GPU as busy.

    python examples/robustness.py --quick
    python examples/robustness.py --out out/robustness.json
"""

from __future__ import annotations

import argparse
import csv
import json
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from smpart.bench.handicaps import Wrong
from smpart.bench.host import host
from smpart.bench.plots import figure
from smpart.bench.study import TRACES, Cell, Study, profiled
from smpart.bench.tracefile import read_trace
from smpart.durable import write_whole
from smpart.engine.deployment import Deployment
from smpart.sim.published import data_file

BASE = Cell("llama-3.1-8b", "h100", "azure-conv", "tight")
SHARE = 0.9
"""Of smpart's capacity."""
FACTORS = (0.5, 0.7, 0.9, 1.1, 1.3, 1.5)
RIVALS = ("chunked", "static:50/50")


@dataclass(frozen=True)
class Question:
    """One run: `prefill` and `decode` are told seconds over true ones."""

    kind: str
    case: str
    cell: Cell
    policy: str = "smpart"
    prefill: float = 1.0
    decode: float = 1.0


def questions(shifted: Path, factors: tuple[float, ...]) -> Iterator[Question]:
    """All of them."""
    yield Question("undisturbed", "azure-conv", BASE)
    for factor in factors:
        yield Question("wrong", f"both x{factor:g}", BASE, prefill=factor, decode=factor)
        yield Question("wrong", f"prefill x{factor:g}, decode x{1 / factor:.2g}", BASE, "smpart", factor, 1 / factor)
    loads = [
        ("bursts", "poisson", replace(BASE, trace="synth:chat:poisson")),
        ("bursts", "bursty", replace(BASE, trace="synth:chat:bursty")),
        ("shift", "code after conversation", replace(BASE, trace=str(shifted))),
    ]
    for kind, case, cell in loads:
        for policy in ("smpart", *RIVALS):
            yield Question(kind, case, cell, policy)
    for policy in RIVALS:
        yield Question("undisturbed", "azure-conv", BASE, policy)


def run(question: Question, load: float, requests: int, windows: int, predicts: str) -> dict[str, Any]:
    """Attainment at `load`, in multiples of `Study.guess`."""
    wrong = (question.prefill, question.decode) != (1.0, 1.0)
    handicap = partial(_wrong, prefill=question.prefill, decode=question.decode) if wrong else None
    study = Study(question.cell, requests, windows, handicap=handicap, predicts=predicts)
    rate = load * study.guess
    records = [study.at(question.policy, rate, seed).record for seed in range(windows)]
    shares = [float(str(record["slo_attainment"])) for record in records]
    return {
        "kind": question.kind, "case": question.case, "policy": question.policy, "rate": rate,
        "slo_attainment": sum(shares) / len(shares), "runs": records,
    }  # fmt: skip


def _wrong(deployment: Deployment, prefill: float, decode: float) -> Wrong:
    return Wrong(deployment.predictor.prior, prefill, decode)


def shift(folder: Path, requests: int) -> Path:
    """A trace whose first half is conversation and whose second half is code, at the same mean gap."""
    path, half = folder / "shift.csv", requests // 2
    rows = []
    for name in ("azure-conv", "azure-code"):
        part = read_trace(data_file(TRACES[name]), "auto").first(half)
        gap = 1.0 / part.rate
        begin = rows[-1][0] + 1.0 if rows else 0.0
        rows += [(begin + a.time_s / gap, a.prompt_tokens, a.output_tokens) for a in part.arrivals]
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("TIMESTAMP", "ContextTokens", "GeneratedTokens"))
        writer.writerows(rows)
    return path


def draw(answers: list[dict[str, Any]], path: Path) -> None:
    """A bar a case."""
    canvas, (axis,) = figure(1, [1.0], (9, 0.3 * len(answers) + 1.2))
    names = [f"{a['kind']}: {a['case']}, {a['policy']}" for a in answers][::-1]
    colours = ["#0072B2" if a["policy"] == "smpart" else "#E69F00" for a in answers][::-1]
    axis.barh(names, [a["slo_attainment"] for a in answers][::-1], color=colours)
    axis.set_xlabel("requests that met every objective")
    axis.set_xlim(0.0, 1.0)
    canvas.savefig(path)


def main() -> None:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/robustness.json"))
    parser.add_argument("--profiles", type=Path, default=Path("out/profiles"), help="made there if they are missing")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    parser.add_argument("--requests", type=int, default=300, help="requests of one replay")
    parser.add_argument("--windows", type=int, default=3, help="windows of the trace")
    parser.add_argument("--quick", action="store_true", help="two factors, one window, 80 requests")
    asked = parser.parse_args()
    requests, windows, factors = asked.requests, asked.windows, FACTORS
    if asked.quick:
        requests, windows, factors = 80, 1, (0.7, 1.5)
    predicts = profiled(BASE.model, BASE.gpu, asked.profiles)
    base = Study(BASE, requests, windows, predicts=predicts)
    capacity = float(str(base.capacity("smpart").record["capacity_rps"]))
    load = SHARE * capacity / base.guess
    print(f"smpart's capacity: {capacity:.3g} req/s; everything at {SHARE:.0%} of it", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        asking = list(questions(shift(Path(folder), requests), factors))
        with ProcessPoolExecutor(asked.jobs, mp_context=get_context("forkserver")) as pool:
            ask = partial(run, load=load, requests=requests, windows=windows, predicts=predicts)
            answers = []
            for answer in pool.map(ask, asking):
                answers.append(answer)
                told = f"{answer['kind']}, {answer['case']}, {answer['policy']}"
                print(f"{told}: {answer['slo_attainment']:.1%}", flush=True)
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    results = {"schema": 1, "host": host(), "requests": requests, "windows": windows, "capacity_rps": capacity,
               "share": SHARE, "answers": answers}  # fmt: skip
    write_whole(asked.out, json.dumps(results, indent=1).encode() + b"\n")
    draw(answers, asked.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
