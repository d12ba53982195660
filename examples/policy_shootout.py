"""Every policy on the same simulated engine: capacity over models, GPUs, traces and objectives.

Capacity is the highest rate at which 90 % of all requests meet every objective and the queue does not grow, searched
for each policy on the same windows of the trace. Objectives are those of `smpart.bench.study`. Cells that are in the
output file already are not run again; the summary is of all that were run with the same options. Policies that predict
do so from a profile that `smpart profile` would make, corrected as they go. Reads the traces of the data folder
(``SMPART_DATA``).

    python examples/policy_shootout.py --quick
    python examples/policy_shootout.py --out out/policy_shootout.json
"""

from __future__ import annotations

import itertools
import json
import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from smpart.bench.bench import FEWEST
from smpart.bench.plots import figure, save
from smpart.bench.questions import Answer, Question, inquiry, parser, size
from smpart.bench.study import OBJECTIVES, TRACES, Cell, geometric, shares
from smpart.errors import UsageError
from smpart.scheduler import make_policy

NAME = "policy_shootout"
PLACES = (
    ("llama-3.1-8b", "a100"),
    ("llama-3.1-8b", "h100"),
    ("qwen3-32b-fp8", "h200"),
    ("llama-3.1-70b-fp8", "h200"),
)
LONG = ("mooncake-conv", "mooncake-synth")
"""Traces whose requests take some ten times as long as those of the others: half as many make a replay."""
BURSTY = ("azure-conv", "azure-code")
"""Traces of which one burst decides a window: twice as many windows are tried."""
PATIENT = ("azure-conv", "loose")
"""Trace and objectives under which a tenth of such a window may wait at once and still be in time, so that it tells
no queue that grows from one that fills: half as many windows are tried, each four times as long."""
OURS = "smpart"
RIVALS = (
    "static:75/25", "static:50/50", "pdmux", "muxwise", "bullet", "nexus", "semipd", "duet", "chunked+slack",
    "mixed", "chunked:2048", "chunked:512", "chunked:256",
)  # fmt: skip
"""``static:P/D`` are shares in percent. Of a static split, and of a chunk budget, the best one tried counts."""
TUNED = ("static", "chunked")
QUICK_POLICIES = (OURS, "chunked", "chunked+slack", "static:50/50")
QUICK = (Cell("llama-3.1-8b", "h100", "azure-conv", "tight"), Cell("llama-3.1-8b", "a100", "azure-code", "loose"))
LEAST = 0.98
"""Share of the best rival's capacity below which a cell is listed as lost."""


@dataclass(frozen=True, kw_only=True)
class Capacities(Question):
    """What does every policy hold here?"""

    policies: tuple[str, ...]

    def answer(self, profiles: Path) -> Answer:
        """Every policy's capacity, with the record of the run at it. A search begins where the last one ended.

        Rates under a tenth of the first policy's capacity are not tried. Latencies are compared at one rate: what the
        best chunk budget holds.
        """
        started = time.monotonic()
        study = self.study(profiles)
        runs: Answer = {}
        guess = least = None
        for policy in self.policies:
            runs[policy] = study.capacity(policy, guess, least).record
            guess = runs[policy]["capacity_rps"] or guess
            least = least or (guess and 0.1 * guess)
        chunked = best_chunked(runs)
        equal = study.at(OURS, chunked["capacity_rps"]).record if chunked else None
        about = {"name": self.cell.name, **asdict(self.cell), "slo": asdict(study.slo)}
        return {**about, "seconds": round(time.monotonic() - started, 1), "runs": runs, "ours_at_chunked": equal}

    def line(self, answer: Answer) -> str:
        """Capacities in requests a second, the best first."""
        ranked = sorted(capacities(answer).items(), key=lambda item: -item[1])
        told = ", ".join(f"{policy} {rate:.3g}" for policy, rate in ranked)
        slo = answer["slo"]
        objectives = f"TTFT {slo['ttft_ms']:g}, TPOT {slo['tpot_ms']:g} ms"
        return f"{answer['name']} ({objectives}): {told} [{answer['seconds']:.0f} s]"


def best_chunked(runs: dict[str, Any]) -> dict[str, Any] | None:
    """The run of the chunk budget that holds the highest rate; None if none holds any."""
    budgets = [run for policy, run in runs.items() if policy.partition(":")[0] == "chunked"]
    best: dict[str, Any] | None = max(budgets, key=lambda run: float(run["capacity_rps"]), default=None)
    return best if best and best["capacity_rps"] else None


def latencies(cell: dict[str, Any]) -> dict[str, float]:
    """Our 95th percentile of TTFT and 99th of ITL over those of the best chunk budget, at the rate that one holds."""
    ours, theirs = cell["ours_at_chunked"], best_chunked(cell["runs"])
    if not ours or not theirs:
        return {}
    return {f"{name}_{at}": ours[name][at] / theirs[name][at] for name, at in (("ttft_ms", "p95"), ("itl_ms", "p99"))}


def capacities(cell: dict[str, Any]) -> dict[str, float]:
    """By policy, one with several settings under the best of them."""
    found: dict[str, float] = {}
    for policy, run in cell["runs"].items():
        name = policy.partition(":")[0]
        name = name if name in TUNED else policy
        found[name] = max(found.get(name, 0.0), float(run["capacity_rps"]))
    return found


def summary(cells: list[dict[str, Any]]) -> dict[str, Any]:
    """Ratios of capacity over the cells that anybody can hold at all, and the cells where ours is not the best.

    Where a rival holds no rate at all the ratio is infinite: such cells are counted and left out of the means.
    """
    over: dict[str, list[float]] = {}
    best, tight, lost, nobody = [], [], [], 0
    for cell in cells:
        rivals = capacities(cell)
        if OURS not in rivals or len(rivals) == 1:
            continue  # nothing to compare
        ours = rivals.pop(OURS)
        if not max(ours, *rivals.values()):
            nobody += 1
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
        "held_by_nobody": nobody,
        "over_best_rival": geometric(best),
        "over_chunked_where_tight": round(sum(tight) / len(tight), 3) if tight else None,
        "over": {policy: geometric(ratios) for policy, ratios in sorted(over.items())},
        "ours_over_chunked_at_equal_rate": {
            name: geometric([told[name] for cell in cells if name in (told := latencies(cell))])
            for name in ("ttft_ms_p95", "itl_ms_p99")
        },
        "infinite": {policy: sum(map(math.isinf, ratios)) for policy, ratios in sorted(over.items())},
        "lost": lost,
    }


def table(cells: list[dict[str, Any]]) -> Table:
    """For people: capacities in requests a second, and ours over the best rival's."""
    view = Table(title="capacity, req/s; TTFT and TPOT in ms", title_justify="left")
    names = list(dict.fromkeys(name for cell in cells for name in capacities(cell)))
    for name in ("model, GPU, trace, objectives", "TTFT", "TPOT", *names, f"{OURS} / best"):
        view.add_column(name, justify="left" if name.startswith("model") else "right")
    for cell in cells:
        held = capacities(cell)
        best = max((rate for name, rate in held.items() if name != OURS), default=0.0)
        ratio = f"{held[OURS] / best:.2f}" if best and OURS in held else "-"
        rates = (f"{held[name]:.3g}" if name in held else "-" for name in names)
        view.add_row(cell["name"], f"{cell['slo']['ttft_ms']:g}", f"{cell['slo']['tpot_ms']:g}", *rates, ratio)
    return view


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
    save(canvas, path)


def check(policies: tuple[str, ...]) -> None:
    """Raise `UsageError` for a policy that there is not, before anything is measured."""
    for policy in policies:
        name, _, argument = policy.partition(":")
        if name == "static":
            shares(argument)
        else:
            make_policy(policy)


def main() -> None:
    """Run what was asked for."""
    options = parser(__doc__, NAME, jobs="cells", quick="two cells, four policies, 100 requests")
    options.add_argument("--contention", type=float, default=1.0, help="multiplies slowdowns beside a neighbour")
    options.add_argument("--policies", help="comma-separated; by default all")
    options.add_argument("--cells", help="only cells whose name holds each of these words, joined by +")
    asked = options.parse_args()
    scope = size(asked, 100)
    asked.policies = asked.policies or ",".join(QUICK_POLICIES if asked.quick else (OURS, *RIVALS))
    policies, requests, windows = tuple(asked.policies.split(",")), scope["requests"], scope["windows"]
    every = [Cell(*place, trace, kind) for kind, trace, place in itertools.product(OBJECTIVES, TRACES, PLACES)]
    cells = [cell for cell in every if all(word in cell.name for word in (asked.cells or "").split("+"))]
    if asked.quick and asked.cells is None:
        cells = list(QUICK)
    if not cells:
        options.error(f"--cells {asked.cells}: no such cell; one is {every[0].name!r}")
    try:
        check(policies)
    except UsageError as error:
        options.error(f"--policies: {error}")

    def question(cell: Cell) -> Capacities:
        count, times = requests, windows
        if (cell.trace, cell.objective) == PATIENT:
            count = 4 * requests
        elif cell.trace in BURSTY:
            times = 2 * windows
        elif cell.trace in LONG:
            count = max(FEWEST, requests // 2)
        return Capacities(
            cell=cell,
            requests=count,
            windows=times,
            contention=asked.contention,
            minutes=scope["minutes"],
            policies=policies,
        )

    with inquiry(asked, NAME) as survey:
        survey.ask([question(cell) for cell in cells])
        done = survey.known(question(cell) for cell in every)
        told = summary(done)
        survey.finish({"summary": told}, lambda path: draw(done, path))
        survey.show(table(done))
        survey.show(json.dumps(told, indent=1))


if __name__ == "__main__":
    main()
