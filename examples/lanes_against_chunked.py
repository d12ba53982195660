"""What two lanes are worth beside chunked prefill: one bursty load with long prompts, several objectives.

The objective is fitted to the machine: TPOT is 2x (and 1.2x, 4x, 8x) a decode step on one lane at the mean batch.
Chunked gets the budget of 32, 64, ..., 2048 tokens a step that is best for each objective (its schedule depends on
the budget only, so one replay of each budget is judged by every objective). Runs are interleaved and repeated.

    python examples/lanes_against_chunked.py --repeat 3 --json
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

import smpart
from smpart.bench.budget import BUDGETS
from smpart.bench.host import host
from smpart.bench.load import Arrival, Load
from smpart.bench.metrics import itl_ms, met, ttft_ms
from smpart.bench.probe import measure
from smpart.bench.replay import Job, Replay, replay
from smpart.bench.source import random_prompt
from smpart.engine import Deployment

FACTORS = (2.0, 1.2, 4.0, 8.0)


@dataclass(frozen=True)
class Score:
    """One replay judged by one objective."""

    goodput: float
    itl_p99: float
    ttft_p95: float
    bubble: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--backend", default="cores")
    parser.add_argument("--requests", type=int, default=18)
    parser.add_argument("--document", type=int, default=700, help="tokens of a long prompt, every sixth one")
    parser.add_argument(
        "--load", type=float, default=0.6, help="share of the prefill lane's speed that prompts ask for"
    )
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()

    kv = smpart.KVConfig(max_len=2 * options.document, max_requests=64, prefix_cache=False)
    with Deployment.open(options.model, backend=options.backend, kv=kv) as deployment:
        speed = measure(deployment)
        load = bursts(options.requests, options.document, options.seed)
        lengths = [a.prompt_tokens for a in load.arrivals], [a.output_tokens for a in load.arrivals]
        load = load.at_rate(speed.rate_for(*lengths, options.load), options.seed)
        batch = speed.mean_batch(load)
        step_ms = 1e3 * speed.step(batch)
        base = speed.slo_for(load, batch)
        slos = {f: smpart.SLO(ttft_ms=base.ttft_ms, tpot_ms=f * step_ms) for f in FACTORS}
        say(
            f"{load.name}: {len(load.arrivals)} requests at {load.rate:.3g}/s, prompts up to {max(lengths[0])} tokens; "
            f"one-lane step {step_ms:.0f} ms at batch {batch:.1f}; TTFT objective {base.ttft_ms:g} ms"
        )
        chunked: dict[int, list[Replay]] = defaultdict(list)
        ours: dict[float, list[Replay]] = defaultdict(list)
        for number in range(options.repeat):
            for budget in BUDGETS:
                chunked[budget].append(serve(deployment, f"chunked:{budget}", slos[2.0], load, number))
                say(f"chunked:{budget} {chunked[budget][-1].seconds:.0f} s")
            for factor, slo in slos.items():
                ours[factor].append(serve(deployment, "smpart", slo, load, number))
                say(f"smpart at {factor}x {ours[factor][-1].seconds:.0f} s")
    rows = [compare(factor, slos[factor], chunked, ours[factor]) for factor in FACTORS]
    for row in rows:
        print(
            f"TPOT {row['factor']}x ({row['slo']['tpot_ms']:.0f} ms), best chunked:{row['budget']}: "
            + ", ".join(f"{k} {v['median']:.2f}x ({v['min']:.2f} to {v['max']:.2f})" for k, v in row["ratio"].items())
        )
    if options.json:
        record = {
            "schema": 1,
            "command": "lanes_against_chunked",
            "host": host(),
            "options": vars(options),
            "step_ms": step_ms,
            "mean_batch": batch,
            "rate": load.rate,
            "rows": rows,
        }
        print(json.dumps(record))


def bursts(count: int, document: int, seed: int) -> Load:
    """Bursts of six: five questions of some dozens of tokens and one document; answers of about 32 tokens."""
    rng = np.random.default_rng(seed)
    arrivals = []
    for number in range(count):
        long = number % 6 == 2
        prompt = int(document * rng.uniform(0.8, 1.2)) if long else int(rng.integers(16, 64))
        when = number // 6 + 0.3 * float(rng.random())  # a burst takes a third of the time between two
        arrivals.append(Arrival(when, prompt, int(rng.integers(24, 40))))
    return Load("bursts", tuple(sorted(arrivals, key=lambda a: a.time_s)))


def serve(deployment: Deployment, policy: str, slo: smpart.SLO, load: Load, seed: int) -> Replay:
    """One replay of the load with prompts of random tokens; every seed has prompts of its own."""
    vocab = deployment.model_shape.vocab
    jobs = [
        Job(
            a.time_s,
            random_prompt(a, i, vocab, seed),
            smpart.SamplingParams(max_tokens=a.output_tokens, ignore_eos=True),
        )
        for i, a in enumerate(load.arrivals)
    ]
    return replay(deployment.core(policy, slo, seed=seed), jobs, slo)


def score(result: Replay, slo: smpart.SLO) -> Score:
    """Judge a replay by an objective."""
    gaps = [gap for served in result.served for gap in itl_ms(served)]
    first = [t for served in result.served if (t := ttft_ms(served)) is not None]
    return Score(
        sum(met(served, slo) for served in result.served) / result.seconds,
        float(np.percentile(gaps, 99)),
        float(np.percentile(first, 95)),
        result.log.bubble["decode"],
    )


def compare(factor: float, slo: smpart.SLO, chunked: dict[int, list[Replay]], ours: Sequence[Replay]) -> dict:
    """smpart against the budget with the best median goodput (then the least ITL) for this objective."""
    scores = {budget: [score(r, slo) for r in replays] for budget, replays in chunked.items()}
    best = max(
        scores,
        key=lambda b: (
            statistics.median(s.goodput for s in scores[b]),
            -statistics.median(s.itl_p99 for s in scores[b]),
        ),
    )
    mine = [score(r, slo) for r in ours]
    pairs = list(zip(mine, scores[best], strict=True))
    ratios = {
        "goodput": [a.goodput / b.goodput if b.goodput else float("inf") for a, b in pairs],
        "itl_p99": [a.itl_p99 / b.itl_p99 for a, b in pairs],
        "ttft_p95": [a.ttft_p95 / b.ttft_p95 for a, b in pairs],
    }
    return {
        "factor": factor,
        "slo": {"ttft_ms": slo.ttft_ms, "tpot_ms": slo.tpot_ms, "itl_ms": slo.itl_ms},
        "budget": best,
        "ratio": {k: {"median": statistics.median(v), "min": min(v), "max": max(v)} for k, v in ratios.items()},
        "smpart": [vars(s) for s in mine],
        "chunked": {b: [vars(s) for s in each] for b, each in scores.items()},
    }


def say(line: str) -> None:
    """Progress, on stderr."""
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
