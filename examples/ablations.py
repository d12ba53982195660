"""What each part of the controller is worth: capacity without it, over capacity with everything.

python examples/ablations.py --quick
python examples/ablations.py --out out/ablations.json
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from smpart.bench.handicaps import Unguarded, Unlearning
from smpart.bench.plots import figure, save
from smpart.bench.questions import Answer, Question, inquiry, parser, size
from smpart.bench.study import Cell, Handicap, geometric
from smpart.engine.deployment import Deployment
from smpart.predictor import OnlinePredictor, RooflinePrior

NAME = "ablations"
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


@dataclass(frozen=True, kw_only=True)
class Capacity(Question):
    """What does a variant hold here?"""

    variant: str

    def answer(self, profiles: Path) -> Answer:
        """The record of the run at its capacity."""
        policy, handicap = VARIANTS[self.variant]
        return self.study(profiles, handicap).capacity(policy).record

    def line(self, answer: Answer) -> str:
        """The capacity."""
        return f"{self.cell.name}: {self.variant} {answer['capacity_rps']:.3g} req/s"


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
    save(canvas, path)


def main() -> None:
    """Run what was asked for."""
    asked = parser(__doc__, NAME, jobs="searches", quick="one cell, four variants, 100 requests").parse_args()
    cells, variants = CELLS, tuple(VARIANTS)
    if asked.quick:
        cells = CELLS[:1]
        variants = ("everything", "no estimator", "no slack", "every 100 ms")
    ask = partial(Capacity, **size(asked, 100))
    questions = [ask(cell=cell, variant=variant) for cell in cells for variant in variants]
    with inquiry(asked, NAME) as survey:
        found: dict[str, dict[str, Any]] = {}
        for question, record in zip(questions, survey.ask(questions), strict=True):
            found.setdefault(question.cell.name, {})[question.variant] = record
        told = summary(found)
        survey.finish({"summary": told}, lambda path: draw(told, path))
        survey.show(json.dumps(told, indent=1))


if __name__ == "__main__":
    main()
