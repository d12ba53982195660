"""What two lanes are worth on real cores: a steady and a bursty load with long prompts, several objectives, rivals.

Objectives are fitted to the machine: TPOT is 2x (and 1.2x, 4x) a decode step on one lane at the mean batch. What the
rivals do does not depend on it, so one replay of each is judged by every objective; chunked gets the budget that is
best for each. Runs are interleaved and repeated; every repeat has arrivals and prompts of its own.

    python examples/lanes_on_cores.py --repeat 3 --json
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

import smpart
from smpart.bench.host import host
from smpart.bench.load import Arrival, Load
from smpart.bench.metrics import itl_ms, met, ttft_ms
from smpart.bench.probe import Speed, measure
from smpart.bench.replay import Job, Replay, replay
from smpart.bench.source import random_prompt
from smpart.engine import Deployment

FACTORS = (2.0, 1.2, 4.0)
RIVALS = ("chunked:64", "chunked:128", "chunked:256", "chunked:512", "static", "overlap", "pdmux")
"""``static`` is the even split."""
LOADS = ("steady", "bursty")


@dataclass(frozen=True)
class Score:
    """One replay judged by one objective."""

    goodput: float
    attainment: float
    itl_p99: float
    ttft_p95: float
    bubble: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--backend", default="cores")
    parser.add_argument("--requests", type=int, default=18)
    parser.add_argument("--document", type=int, default=700, help="tokens of a long prompt, every sixth one")
    parser.add_argument(
        "--load", type=float, default=0.6, help="share of the prefill lane's speed that prompts ask for"
    )
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="print one JSON object as stdout's last line")
    options = parser.parse_args()

    kv = smpart.KVConfig(max_len=2 * options.document, max_requests=64, prefix_cache=False)
    with Deployment.open(options.model, backend=options.backend, kv=kv) as deployment:
        speed = measure(deployment)
        tables = [compare_all(deployment, speed, kind, options) for kind in LOADS]
    if options.json:
        record = {"schema": 1, "command": "lanes_on_cores", "host": host(), "options": vars(options), "loads": tables}
        print(json.dumps(record))


def compare_all(deployment: Deployment, speed: Speed, kind: str, options: argparse.Namespace) -> dict:
    """Every policy under one kind of load, every objective: a table, which is printed too."""
    loads = [arrivals(kind, options.requests, options.document, seed) for seed in range(options.repeat)]
    lengths = [
        [a.prompt_tokens for x in loads for a in x.arrivals],
        [a.output_tokens for x in loads for a in x.arrivals],
    ]
    rate = speed.rate_for(*lengths, options.load)
    loads = [load.at_rate(rate, seed) for seed, load in enumerate(loads)]
    batch = speed.mean_batch(loads[0])
    step_ms, base = 1e3 * speed.step(batch), speed.slo_for(loads[0], batch)
    slos = {factor: smpart.SLO(ttft_ms=base.ttft_ms, tpot_ms=factor * step_ms) for factor in FACTORS}
    say(
        f"{kind}: {options.requests} requests at {rate:.3g}/s, prompts up to {max(lengths[0])} tokens; "
        f"one-lane step {step_ms:.0f} ms at batch {batch:.1f}; TTFT objective {base.ttft_ms:g} ms"
    )
    rivals: dict[str, list[Replay]] = defaultdict(list)
    ours: dict[float, list[Replay]] = defaultdict(list)
    for seed, load in enumerate(loads):
        for policy in (speed.lanes if name == "static" else name for name in RIVALS):
            rivals[policy].append(serve(deployment, policy, slos[FACTORS[0]], load, seed))
            say(f"{kind} {seed}: {policy} {rivals[policy][-1].seconds:.0f} s")
        for factor, slo in slos.items():
            ours[factor].append(serve(deployment, "smpart", slo, load, seed))
            say(f"{kind} {seed}: smpart at {factor}x {ours[factor][-1].seconds:.0f} s")
    rows = [row for factor in FACTORS for row in compare(factor, slos[factor], rivals, ours[factor])]
    for row in rows:
        told = ", ".join(f"{name} {words(ratio)}" for name, ratio in row["ratio"].items())
        print(
            f"{kind}, TPOT {row['factor']}x ({row['slo']['tpot_ms']:.0f} ms), over {row['rival']}: {told}", flush=True
        )
    return {"load": kind, "rate": rate, "step_ms": step_ms, "mean_batch": batch, "rows": rows}


def arrivals(kind: str, count: int, document: int, seed: int) -> Load:
    """Five questions of some dozens of tokens to one document, answers of about 32 tokens: in bursts of six, which take
    a third of the time from one to the next, or one by one at random."""
    rng = np.random.default_rng(seed)
    made = []
    steady = np.cumsum(rng.exponential(1.0 / 6.0, count))
    for number in range(count):
        long = number % 6 == 2
        prompt = int(document * rng.uniform(0.8, 1.2)) if long else int(rng.integers(16, 64))
        when = float(steady[number]) if kind == "steady" else number // 6 + 0.3 * float(rng.random())
        made.append(Arrival(when, prompt, int(rng.integers(24, 40))))
    return Load(kind, tuple(sorted(made, key=lambda a: a.time_s)))


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
    kept = sum(met(served, slo) for served in result.served)
    return Score(
        kept / result.seconds,
        kept / len(result.served),
        float(np.percentile(gaps, 99)),
        float(np.percentile(first, 95)),
        result.log.bubble["decode"],
    )


def compare(
    factor: float, slo: smpart.SLO, rivals: dict[str, list[Replay]], ours: Sequence[Replay]
) -> list[dict[str, object]]:
    """smpart against each rival, of chunked the budget with the best median goodput (then the least ITL)."""
    scores = {policy: [score(r, slo) for r in replays] for policy, replays in rivals.items()}
    mine = [score(r, slo) for r in ours]

    def worth(policy: str) -> tuple[float, float]:
        return median(s.goodput for s in scores[policy]), -median(s.itl_p99 for s in scores[policy])

    best = max((policy for policy in scores if policy.startswith("chunked")), key=worth)
    rows: list[dict[str, object]] = []
    for rival in (best, *(policy for policy in scores if not policy.startswith("chunked"))):
        pairs = list(zip(mine, scores[rival], strict=True))
        ratios = {
            "goodput": [a.goodput / b.goodput if b.goodput else float("inf") for a, b in pairs],
            "itl_p99": [a.itl_p99 / b.itl_p99 for a, b in pairs],
            "ttft_p95": [a.ttft_p95 / b.ttft_p95 for a, b in pairs],
        }
        rows.append({
            "factor": factor,
            "slo": {"ttft_ms": slo.ttft_ms, "tpot_ms": slo.tpot_ms, "itl_ms": slo.itl_ms},
            "rival": rival,
            "ratio": {name: spread(values) for name, values in ratios.items()},
            "smpart": [vars(s) for s in mine],
            "theirs": [vars(s) for s in scores[rival]],
        })  # fmt: skip
    return rows


def spread(ratios: Sequence[float]) -> dict[str, float | None]:
    """Median, least and greatest; None for one that is infinite: the rival met no objective at all."""
    told = {"median": median(ratios), "min": min(ratios), "max": max(ratios)}
    return {name: value if np.isfinite(value) else None for name, value in told.items()}


def words(ratio: dict[str, float | None]) -> str:
    """For people."""
    middle, least, most = ("inf" if ratio[at] is None else f"{ratio[at]:.2f}" for at in ("median", "min", "max"))
    return f"{middle}x ({least} to {most})"


def say(line: str) -> None:
    """Progress, on stderr."""
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
