"""The simulated GPUs against silicon: how far virtual time is off where the real thing was measured.

1. A real run: 300 requests that vLLM served on an RTX 4090, replayed in virtual time under the same limits. Constants
   were fitted on the first 100; the errors are those of the other 200.
2. Measured end-to-end points of dense models on H100 and H200 under three engines, each a closed loop of clients:
   errors of the mean time per token and of the mean time to the first one, by GPU, engine and model.

    python examples/simulator_errors.py --quick
    SMPART_DATA=../shared/data python examples/simulator_errors.py --json out/simulator_errors.json

`--quick` takes a few points of each kind, and finishes in a few minutes. Needs the extras `sim` and `profile`.
"""

from __future__ import annotations

import argparse
import json
import random
from collections import defaultdict
from pathlib import Path

import numpy as np

from smpart.bench.silicon import FITTED_ON, EndToEnd, end_to_end, predict, real_run, replay_real_run, summary
from smpart.errors import SmpartError

QUICK_POINTS = 3
QUICK_TOKENS = 9_000
"""Clients times answer length: longer points are left out of a quick run."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_POINTS} short points of each kind")
    parser.add_argument("--seed", type=int, default=0, help="chooses the points of a quick run")
    parser.add_argument("--json", metavar="FILE", nargs="?", const="-", help="write the table as JSON (to stdout)")
    args = parser.parse_args()
    say = (lambda *_: None) if args.json == "-" else print
    result = {"real_run": against_real_run(say), "end_to_end": against_points(say, args.quick, args.seed)}
    if args.json == "-":
        print(json.dumps(result, indent=2))
    elif args.json:
        Path(args.json).parent.mkdir(parents=True, exist_ok=True)
        Path(args.json).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def against_real_run(say) -> dict[str, dict[str, float]]:
    """Errors of the requests that nothing was fitted on."""
    run = real_run()
    ours = replay_real_run(run)
    say(f"vLLM on an RTX 4090, Llama-3.1-8B, {len(run.prompts)} requests: constants from the first {FITTED_ON}")
    say(f"{'':12}{'measured':>12}{'simulated':>12}{'error':>9}{'on the fitted':>16}")
    table = {}
    fitted, held = slice(0, FITTED_ON), slice(FITTED_ON, None)
    fit = {k: v / summary(run.measured, fitted)[k] - 1 for k, v in summary(ours, fitted).items()}
    simulated = summary(ours, held)
    for name, measured in summary(run.measured, held).items():
        error = simulated[name] / measured - 1
        table[name] = {"measured_s": measured, "simulated_s": simulated[name], "error": error, "fitted": fit[name]}
        say(f"{name:12}{measured:>10.4g} s{simulated[name]:>10.4g} s{error:>9.1%}{fit[name]:>16.1%}")
    return table


def against_points(say, quick: bool, seed: int) -> list[dict[str, object]]:
    """Errors by GPU, engine and model; every failure is one of the rows."""
    groups: dict[tuple[str, str, str], list[EndToEnd]] = defaultdict(list)
    for point in end_to_end():
        if not quick or point.concurrency * point.output <= QUICK_TOKENS:
            groups[point.gpu, point.engine, point.name.rpartition(" ")[0]].append(point)
    say(f"\n{'closed loops':44}{'points':>7}{'TPOT error':>12}{'p90':>7}{'bias':>8}{'TTFT error':>12}{'failed':>8}")
    table = []
    for (gpu, engine, model), points in sorted(groups.items()):
        chosen = random.Random(seed).sample(points, min(QUICK_POINTS, len(points))) if quick else points
        rows = [compare(point) for point in chosen]
        good = [row for row in rows if "error" not in row]
        line = {"gpu": gpu, "engine": engine, "model": model, "points": rows, "failed": len(rows) - len(good)}
        cells = ["-"] * 4
        if good:
            tpot, ttft = (np.array([row[name] for row in good]) for name in ("tpot_error", "ttft_error"))
            line |= {
                "tpot_median": float(np.median(np.abs(tpot))),
                "tpot_p90": float(np.percentile(np.abs(tpot), 90)),
                "tpot_bias": float(np.median(tpot)),
                "ttft_median": float(np.median(np.abs(ttft))),
            }
            cells = [f"{line[name]:.1%}" for name in ("tpot_median", "tpot_p90", "tpot_bias", "ttft_median")]
        say(
            f"{f'{gpu} {engine} {model}':44}{len(rows):>7}{cells[0]:>12}{cells[1]:>7}{cells[2]:>8}{cells[3]:>12}"
            f"{line['failed']:>8}"
        )
        table.append(line)
    return table


def compare(point: EndToEnd) -> dict[str, object]:
    row: dict[str, object] = {
        "name": point.name,
        "concurrency": point.concurrency,
        "prompt": point.prompt,
        "output": point.output,
        "ttft_s": point.ttft,
        "tpot_s": point.tpot,
    }
    try:
        ours = predict(point)
    except SmpartError as error:
        return {**row, "error": str(error)}
    ttft, tpot = float(ours.ttft.mean()), float(ours.tpot.mean())
    return {
        **row,
        "simulated_ttft_s": ttft,
        "simulated_tpot_s": tpot,
        "ttft_error": ttft / point.ttft - 1,
        "tpot_error": tpot / point.tpot - 1,
    }


if __name__ == "__main__":
    main()
