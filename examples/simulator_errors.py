"""The simulated GPUs against silicon: how far virtual time is off where the real thing was measured.

1. A real run: 300 requests that vLLM served on an RTX 4090, replayed in virtual time under the same limits. Constants
   were fitted on the first 100; the errors are those of the other 200.
2. Measured end-to-end points of dense models on H100 and H200 under three engines, each a closed loop of clients:
   errors of the mean time per token and of the mean time to the first one, by GPU, engine and model, and what
   AIConfigurator estimates for the same points. Overheads of engines were fitted on every other point; these are the
   errors of the rest. `busy` counts points at odds with the op tables: at the throughput that their latencies mean,
   their kernels alone would take longer than there is time. They are part of every figure.

    python examples/simulator_errors.py --quick
    SMPART_DATA=../shared/data python examples/simulator_errors.py --json out/simulator_errors.json
    python examples/simulator_errors.py --fit

`--quick` takes a few points of each kind, and finishes in a minute or two; all of them take about half an hour.
`--fit` prints the constants as the fitted half of the measurements gives them, in about five minutes. Needs the extras
`sim` and `profile`.
"""

from __future__ import annotations

import argparse
import json
import random
from collections import defaultdict
from pathlib import Path
from statistics import median
from time import perf_counter

import numpy as np

from smpart.bench.host import host, versions
from smpart.bench.silicon import (
    AT_ODDS,
    FITTED_ON,
    EndToEnd,
    busy,
    end_to_end,
    estimate,
    fit_hosts,
    fit_run,
    predict,
    real_run,
    replay_real_run,
    summary,
)
from smpart.errors import SmpartError
from smpart.partition import Shape
from smpart.sim import DIMENSIONS, SiliconCost

QUICK_POINTS = 2
QUICK_TOKENS = 9_000
"""Clients times answer length: longer points are left out of a quick run."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_POINTS} short points of each kind")
    parser.add_argument("--fit", action="store_true", help="print the constants that the fitted half gives")
    parser.add_argument("--seed", type=int, default=0, help="chooses the points of a quick run")
    parser.add_argument("--json", metavar="FILE", nargs="?", const="-", help="write the table as JSON (to stdout)")
    args = parser.parse_args()
    say = (lambda *_: None) if args.json == "-" else lambda line: print(line, flush=True)
    tables = {"aiconfigurator-core": versions(("aiconfigurator-core",))["aiconfigurator-core"]}
    result = {"schema": 1, "command": "simulator_errors", "host": {**host(), **tables}, "seed": args.seed}
    try:
        if args.fit:
            result["fitted"] = constants(say)
        else:
            result["price_us"] = price_us(say)
            result["real_run"] = against_real_run(say)
            result["end_to_end"] = against_points(say, args.quick, args.seed)
    except SmpartError as error:
        raise SystemExit(f"simulator_errors: {error}") from None
    if args.json == "-":
        print(json.dumps(result, indent=1))
    elif args.json:
        Path(args.json).parent.mkdir(parents=True, exist_ok=True)
        Path(args.json).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def constants(say) -> dict[str, object]:
    """What is fitted, from what may be fitted on."""
    run = fit_run(real_run())
    say(f"real run: the first launch holds the engine for {run.warm_up:.4f} s; vllm: {run.step * 1e3:.3f} ms a step")
    hosts = fit_hosts(end_to_end(), say)
    for family, found in hosts.items():
        say(f"{family}: {found.step * 1e3:.1f} ms a step and {found.sequence * 1e6:.0f} us a sequence in it")
    overheads = {family: {"step_s": found.step, "sequence_s": found.sequence} for family, found in hosts.items()}
    return {"warm_up_s": run.warm_up, "vllm": {"step_s": run.step}, **overheads}


def price_us(say) -> dict[str, float]:
    """Microseconds, medians of repeats: of a decode step not asked for before and its neighbour; of a known price."""
    rng, nobody, found = random.Random(0), Shape(), {}
    steps = [(rng.randint(1, 200), rng.randint(100, 4_000), rng.randint(0, 99)) for _ in range(2_000)]
    shapes = [Shape.decode(batch, batch * mean + rest) for batch, mean, rest in steps]
    prompt = Shape.prefill([(2_048, 0)])
    for gpu in ("h100", "rtx4090"):
        cost, repeats = SiliconCost(DIMENSIONS["llama-3.1-8b"], gpu), []
        for _ in range(9):
            begun = perf_counter()
            for shape in shapes:
                cost(shape, 36, prompt, 92)
                cost(prompt, 92, shape, 36)
            pair = perf_counter() - begun
            begun = perf_counter()
            for _ in shapes:
                cost(prompt, 92, nobody, 0)
            repeats.append((pair / len(shapes), (perf_counter() - begun) / len(shapes)))
        new, again = (1e6 * median(column) for column in zip(*repeats, strict=True))
        found[gpu] = {"step_and_neighbour": round(new, 2), "again": round(again, 2)}
        say(f"{gpu}: {new:.1f} us for a new step and its neighbour, {again:.1f} us for a price known")
    return found


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
    """Errors by GPU, engine and model on the points that nothing was fitted on; every failure is one of the rows."""
    groups: dict[tuple[str, str, str], list[EndToEnd]] = defaultdict(list)
    for point in end_to_end():
        if not point.fitted_on and (not quick or point.concurrency * point.output <= QUICK_TOKENS):
            groups[point.gpu, f"{point.engine} {point.version}", point.name.rpartition(" ")[0]].append(point)
    say(f"\n{'':56}{'TPOT error':>26}{'AIC':>8}{'TTFT error':>12}{'AIC':>7}")
    say(f"{'closed loops':44}{'points':>7}{'busy':>5}{'median':>10}{'p90':>8}{'bias':>8}{'median':>8}{'median':>12}")
    table = []
    for (gpu, engine, model), points in sorted(groups.items()):
        chosen = random.Random(seed).sample(points, min(QUICK_POINTS, len(points))) if quick else points
        rows = [compare(point) for point in chosen]
        good = [row for row in rows if "error" not in row]
        odd = sum(row["busy"] > AT_ODDS for row in good)
        line = {"gpu": gpu, "engine": engine, "model": model, "failed": len(rows) - len(good), "busy": odd}
        line |= figures(good)
        cells = "".join(f"{line[name]:>{width}.1%}" for name, width in COLUMNS.items()) if good else "  all failed"
        say(f"{f'{gpu} {engine} {model}':44}{len(rows):>7}{odd:>5}{cells}")
        table.append({**line, "points": rows})
    return table


COLUMNS = {
    "tpot_median": 10,
    "tpot_p90": 8,
    "tpot_bias": 8,
    "aic_tpot_median": 8,
    "ttft_median": 12,
    "aic_ttft_median": 7,
}


def figures(rows: list[dict[str, object]]) -> dict[str, float]:
    if not rows:
        return {}
    names = ("tpot_error", "ttft_error", "aic_tpot_error", "aic_ttft_error")
    tpot, ttft, aic_tpot, aic_ttft = (np.array([row[name] for row in rows]) for name in names)
    return {
        "tpot_median": float(np.median(np.abs(tpot))),
        "tpot_p90": float(np.percentile(np.abs(tpot), 90)),
        "tpot_bias": float(np.median(tpot)),
        "aic_tpot_median": float(np.median(np.abs(aic_tpot))),
        "ttft_median": float(np.median(np.abs(ttft))),
        "aic_ttft_median": float(np.median(np.abs(aic_ttft))),
    }


def compare(point: EndToEnd) -> dict[str, object]:
    row: dict[str, object] = {
        "name": point.name,
        "concurrency": point.concurrency,
        "prompt": point.prompt,
        "output": point.output,
        "ttft_s": round(point.ttft, 5),
        "tpot_s": round(point.tpot, 6),
    }
    try:
        ours, theirs = predict(point), estimate(point)
    except SmpartError as error:
        return {**row, "error": str(error)}
    return {
        **row,
        "busy": round(busy(point), 3),
        "tpot_error": round(float(ours.tpot.mean()) / point.tpot - 1, 4),
        "ttft_error": round(float(ours.ttft.mean()) / point.ttft - 1, 4),
        "aic_tpot_error": round(theirs.tpot / point.tpot - 1, 4),
        "aic_ttft_error": round(theirs.ttft / point.ttft - 1, 4),
    }


if __name__ == "__main__":
    main()
