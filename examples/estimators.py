"""How well estimators of latency predict what they did not see, on times that others measured and published.

smpart's estimator and four published forms, all fitted to the same rows and asked for the same others:

* ``shapes``: shapes held out, five folds;
* ``shapes and SMs``: cells whose shape and whose SM count are both unseen (published SM scaling only). The smallest
  and the largest SM count are always seen, as a sweep always measures both;
* ``beyond``: fitted to shapes up to half of the largest total of tokens, asked for those up to twice as large.

Those on SM scaling are MuxWise's own polynomials, evaluated: they test the SM axis, not the form in shapes.

    python examples/estimators.py --quick
    SMPART_DATA=../shared/data python examples/estimators.py --full --json out/estimators.json
    python examples/estimators.py --profile out/profile
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from sklearn.base import clone
from sklearn.model_selection import GroupKFold
from sklearn.utils.parallel import Parallel, delayed

from smpart.bench.heldout import TESTS, Measured, held_out
from smpart.bench.host import host
from smpart.bench.truths import Truth, aiconfigurator, rtx4090, sm_scaling
from smpart.errors import SmpartError
from smpart.predictor.accuracy import Errors, groups, summed_up
from smpart.predictor.estimators.base import SHAPE, LatencyEstimator, column
from smpart.predictor.estimators.contention import Contention
from smpart.predictor.estimators.published import PUBLISHED
from smpart.profiler.store import Store

Floats = NDArray[np.float64]
Rows = NDArray[np.intp]
Split = tuple[Rows, Rows]

ESTIMATORS: Mapping[str, type[LatencyEstimator]] = {"smpart": Contention, **PUBLISHED}
FOLDS = 5
FEWEST = 20
"""Rows to fit to, below which a test says nothing."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a few truths only")
    parser.add_argument("--full", action="store_true", help="op timings of every engine, all rows of each truth (long)")
    parser.add_argument("--rows", type=int, default=300, help="at most so many rows of a truth, drawn at random")
    parser.add_argument("--profile", type=Path, metavar="DIR", help="also judge on a profile made by smpart profile")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures, each truth by itself too")
    options = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 180)
    try:
        cases = list(published(options.quick, options.full, options.rows))
        started = time.perf_counter()
        own = judge_profile(options.profile) if options.profile else {}
        off = judge(cases, processes=min(2, os.cpu_count() or 1)) | own
    except SmpartError as error:
        raise SystemExit(f"estimators: {error}") from None
    pooled = by_family(off)
    console.print(table(pooled, f"{len(cases)} truths, {time.perf_counter() - started:.0f} s"))
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(record(cases, off, pooled), indent=1))
        console.print(f"written to {options.json}")


# ---- what they are judged on


def published(quick: bool, full: bool, rows: int) -> Iterator[Truth]:
    """The truths, each thinned to so many rows unless all are asked for."""
    gpus = ("h100_sxm",) if quick else ("a100_sxm", "h100_sxm", "h200_sxm")
    engines = ("vllm", "sglang", "trtllm") if full else ("vllm",)
    for truth in (*sm_scaling(), *rtx4090(), *aiconfigurator(gpus, engines)):
        if not quick or any(part in truth.name for part in ("/A100/", "llama-3.1-8b")):
            yield truth if full else thinned(truth, rows)


def thinned(truth: Truth, rows: int) -> Truth:
    kept = np.sort(np.random.default_rng(0).permutation(len(truth.y))[:rows])
    return replace(truth, X=truth.X[kept], y=truth.y[kept])


def shapes(truth: Truth) -> list[Split]:
    kinds = groups(truth.X, SHAPE)
    return list(GroupKFold(min(FOLDS, len(np.unique(kinds)))).split(truth.X, groups=kinds))


def shapes_and_sms(truth: Truth) -> list[Split]:
    """Five fits, each without a fifth of the shapes and without a fifth of the SM counts, asked for where both meet."""
    inner = np.unique(column(truth.X, "units"))[1:-1]
    if len(inner) < FOLDS:
        return []
    splits = []
    for fold, (_, unseen) in enumerate(shapes(truth)):
        shape = np.isin(np.arange(len(truth.y)), unseen)
        sms = np.isin(column(truth.X, "units"), inner[fold::FOLDS])
        splits.append((np.flatnonzero(~shape & ~sms), np.flatnonzero(shape & sms)))
    return splits


def beyond(truth: Truth) -> list[Split]:
    """One fit to shapes of at most half the largest total of tokens of their phase."""
    prefill = column(truth.X, "prefill_tokens") + column(truth.X, "prefill_context")
    decode = column(truth.X, "decode_batch") + column(truth.X, "decode_context")
    phase, total = (prefill > 0.0) + 2 * (decode > 0.0), prefill + decode
    largest = np.array([total[phase == p].max(initial=0.0) for p in range(4)])
    small = total <= largest[phase] / 2
    train, test = np.flatnonzero(small), np.flatnonzero(~small & np.isin(phase, phase[small]))
    return [(train, test)] if len(train) >= FEWEST and len(test) else []


TEST_SPLITS: Mapping[str, Callable[[Truth], list[Split]]] = {
    "shapes": shapes,
    "shapes and SMs": shapes_and_sms,
    "beyond": beyond,
}

# ---- how they are judged

Off = dict[tuple[str, str, str], Floats]
"""Absolute percentage errors of every case, by name, test and estimator."""


def judge(cases: Sequence[Truth], processes: int) -> Off:
    jobs = [
        (truth, test, name, split)
        for truth in cases
        for test, splits in TEST_SPLITS.items()
        for split in splits(truth)
        for name in ESTIMATORS
    ]
    found = Parallel(n_jobs=processes)(
        delayed(errors_of)(ESTIMATORS[name](truth.model, truth.units), truth, split) for truth, _, name, split in jobs
    )
    off: dict[tuple[str, str, str], list[Floats]] = defaultdict(list)
    for (truth, test, name, _), part in zip(jobs, found, strict=True):
        off[truth.name, test, name].append(part)
    return {key: np.concatenate(parts) for key, parts in off.items()}


def errors_of(estimator: LatencyEstimator, truth: Truth, split: Split) -> Floats:
    train, test = split
    fitted = clone(estimator).fit(truth.X[train], truth.y[train])
    return np.asarray(np.abs(fitted.predict(truth.X[test]) / truth.y[test] - 1.0))


def judge_profile(folder: Path) -> Off:
    """The held-out tests of ``smpart fit``; what a profile holds too little for is left out."""
    store = Store.open(folder)
    measured, units = Measured.of(store.samples()), int(store.fingerprint.device["units"])
    off: Off = {}
    for name, form in ESTIMATORS.items():
        for test in TESTS:
            try:
                held = held_out(form(store.fingerprint.model, units), measured, test)
            except ValueError:
                continue
            rows = held.fold >= 0
            off[f"profile/{folder.name}", test, name] = np.abs(held.predicted[rows] / measured.seconds[rows] - 1.0)
    return off


# ---- what is told

Pooled = dict[tuple[str, str], dict[str, Errors]]
"""Errors by family and test, then by estimator, over the cases of all truths of the family."""


def by_family(off: Off) -> Pooled:
    pooled: dict[tuple[str, str], dict[str, list[Floats]]] = defaultdict(lambda: defaultdict(list))
    for (name, test, estimator), part in off.items():
        pooled[name.split("/", 1)[0], test][estimator].append(part)
    return {key: {name: summed_up(np.concatenate(p)) for name, p in found.items()} for key, found in pooled.items()}


def table(pooled: Pooled, title: str) -> Table:
    """Median, 95th percentile and largest error in per cent; the least of each row in bold."""
    shown = Table("truths", "held out", "cases", title=f"median / p95 / max error in %: {title}")
    for name in ESTIMATORS:
        shown.add_column(name, no_wrap=True)
    for (family, test), found in pooled.items():
        least = [min(errors[place] for errors in found.values()) for place in range(3)]
        cells = [
            " / ".join(
                f"[bold]{100 * value:.1f}[/bold]" if value == least[place] else f"{100 * value:.1f}"
                for place, value in enumerate(found[name][:3])
            )
            if name in found
            else "-"
            for name in ESTIMATORS
        ]
        shown.add_row(family, test, str(next(iter(found.values())).cases), *cells)
    return shown


def record(cases: Sequence[Truth], off: Off, pooled: Pooled) -> dict[str, object]:
    return {
        "schema": 1,
        "command": "estimators",
        "host": host(),
        "sources": {t.name: {"source": t.source, "licence": t.licence, "notes": t.notes} for t in cases},
        "families": [
            {"family": family, "test": test, "estimator": name, **errors._asdict()}
            for (family, test), found in pooled.items()
            for name, errors in found.items()
        ],
        "truths": [
            {"truth": truth, "test": test, "estimator": name, **summed_up(part)._asdict()}
            for (truth, test, name), part in off.items()
        ],
    }


if __name__ == "__main__":
    main()
