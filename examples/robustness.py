"""What is left of smpart's attainment when its predictor is wrong, arrivals come in bursts, the traffic changes,
or there is too much of it.

Everything is run at one share of smpart's own capacity on the undisturbed load, chunked prefill and a fixed split
beside it. On other loads that share is of the rate that keeps the GPU as busy. Overload is a multiple of the
undisturbed rate: goodput tells more there than attainment does. The same with half of the requests best effort: those
are not judged, and what they get is told apart.

    python examples/robustness.py --quick
    python examples/robustness.py --out out/robustness.json
"""

from __future__ import annotations

import csv
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from smpart.bench.handicaps import Skewed, Wrong
from smpart.bench.plots import figure, save
from smpart.bench.questions import Answer, Question, inquiry, parser, size
from smpart.bench.study import TRACES, Cell, Study
from smpart.bench.tracefile import read_trace
from smpart.engine.deployment import Deployment
from smpart.predictor import OnlinePredictor
from smpart.sim.published import data_file

NAME = "robustness"
BASE = Cell("llama-3.1-8b", "h100", "azure-conv", "tight")
SHARE = 0.9
"""Of smpart's capacity."""
FACTORS = (0.5, 0.7, 0.9, 1.1, 1.3, 1.5)
RIVALS = ("chunked", "static:50/50")
OVERLOADS = (1.5, 2.0)
REFUSING = "smpart:refuse"
"""Does not begin what cannot be in time."""
SHIFT = "azure-code after azure-conv"
"""The trace that `shift` makes."""


@dataclass(frozen=True, kw_only=True)
class Capacity(Question):
    """What does smpart hold?"""

    def answer(self, profiles: Path) -> Answer:
        """The capacity, also in multiples of `Study.guess`."""
        study = self.study(profiles)
        held = float(str(study.capacity("smpart").record["capacity_rps"]))
        return {"capacity_rps": held, "over_guess": held / study.guess}

    def line(self, answer: Answer) -> str:
        """The capacity."""
        return f"smpart's capacity: {answer['capacity_rps']:.3g} req/s; everything at {SHARE:.0%} of it"


@dataclass(frozen=True, kw_only=True)
class Attainment(Question):
    """How many requests meet every objective at `times` `load`, in multiples of `Study.guess`?

    `prefill` and `decode` are told seconds over true ones, which observations mend or not; `best_effort` is a share of
    the requests.
    """

    kind: str
    case: str
    load: float
    policy: str = "smpart"
    prefill: float = 1.0
    decode: float = 1.0
    mends: bool = False
    times: float = 1.0
    best_effort: float = 0.0

    def answer(self, profiles: Path) -> Answer:
        """The share, over all windows."""
        if self.cell.trace != SHIFT:
            return self._at(self.study(profiles, self._handicap()))
        with tempfile.TemporaryDirectory() as folder:
            cell = replace(self.cell, trace=str(shift(Path(folder), self.requests, self.windows)))
            return self._at(replace(self, cell=cell).study(profiles, self._handicap()))

    def line(self, answer: Answer) -> str:
        """The share."""
        share, goodput = answer["slo_attainment"], answer["goodput_rps"]
        return f"{self.kind}, {self.case}, {self.policy}: {share:.1%}, {goodput:.3g} req/s"

    def _handicap(self) -> partial[OnlinePredictor] | None:
        wrong = (self.prefill, self.decode) != (1.0, 1.0)
        return partial(_wrong, prefill=self.prefill, decode=self.decode, mends=self.mends) if wrong else None

    def _at(self, study: Study) -> Answer:
        rate = self.times * self.load * study.guess
        records: list[Any] = [
            study.at(self.policy, rate, seed, self.best_effort).record for seed in range(self.windows)
        ]
        spare = [record["best_effort"]["throughput_tok_s"] for record in records if record["best_effort"]]
        return {
            "kind": self.kind, "case": self.case, "policy": self.policy, "rate": rate,
            "slo_attainment": fmean(record["slo_attainment"] for record in records),
            "goodput_rps": fmean(record["goodput_rps"] for record in records),
            "best_effort_tok_s": fmean(spare) if spare else None, "runs": records,
        }  # fmt: skip


def questions(
    ask: Callable[..., Attainment], factors: tuple[float, ...], overloads: tuple[float, ...]
) -> Iterator[Attainment]:
    """All of them, each with what `ask` adds."""
    calm = partial(ask, kind="undisturbed", case="azure-conv", cell=BASE)
    yield calm()
    for kind, mends in (("wrong profile, corrected", True), ("wrong for good", False)):
        wrong = partial(ask, kind=kind, cell=BASE, mends=mends)
        for factor in factors:
            yield wrong(case=f"both x{factor:g}", prefill=factor, decode=factor)
            yield wrong(case=f"prefill x{factor:g}, decode x{1 / factor:.2g}", prefill=factor, decode=1 / factor)
    loads = (
        ("bursts", "poisson", "synth:chat:poisson"),
        ("bursts", "bursty", "synth:chat:bursty"),
        ("shift", "code after conversation", SHIFT),
    )
    for kind, case, trace in loads:
        for policy in ("smpart", *RIVALS):
            yield ask(kind=kind, case=case, cell=replace(BASE, trace=trace), policy=policy)
    for policy in RIVALS:
        yield calm(policy=policy)
    for times in overloads:
        for policy in ("smpart", REFUSING, "chunked"):
            yield ask(kind="overload", case=f"x{times:g}", cell=BASE, policy=policy, times=times)
        for policy in ("smpart", "chunked"):
            case = f"x{times:g}, half best effort"
            yield ask(kind="overload", case=case, cell=BASE, policy=policy, times=times, best_effort=0.5)


def _wrong(deployment: Deployment, prefill: float, decode: float, mends: bool) -> OnlinePredictor:
    prior = deployment.predictor.prior
    return OnlinePredictor(Skewed(prior, prefill, decode)) if mends else Wrong(prior, prefill, decode)


def shift(folder: Path, requests: int, windows: int) -> Path:
    """A trace whose windows begin with conversation and end with code, half and half, at the same mean gap."""
    path, half = folder / "shift.csv", requests // 2
    halves = (("azure-conv", half), ("azure-code", requests - half))
    whole = {name: read_trace(data_file(TRACES[name]), "auto") for name, _ in halves}
    rows: list[tuple[float, int, int]] = []
    for number in range(windows):
        for name, count in halves:
            part = whole[name].window(number, count)
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
    save(canvas, path)


def main() -> None:
    """Run what was asked for."""
    quick = "two factors, one overload, one window, 80 requests"
    asked = parser(__doc__, NAME, jobs="runs", quick=quick, windows=3).parse_args()
    cases, scope = ((0.7, 1.5), (2.0,)) if asked.quick else (FACTORS, OVERLOADS), size(asked, 80)
    with inquiry(asked, NAME) as survey:
        (held,) = survey.ask([Capacity(cell=BASE, **scope)])
        ask = partial(Attainment, load=SHARE * held["over_guess"], **scope)
        answers = survey.ask(list(questions(ask, *cases)))
        rows = [{key: value for key, value in answer.items() if key != "runs"} for answer in answers]
        told = {"capacity_rps": held["capacity_rps"], "share": SHARE, "attainments": rows}
        survey.finish(told, lambda path: draw(answers, path))


if __name__ == "__main__":
    main()
