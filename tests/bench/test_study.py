"""Studies: objectives that are what they say, splits in percent, and one number a search."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from smpart.bench.study import Cell, Study, geometric
from smpart.partition import Shape
from smpart.sim import DIMENSIONS, SiliconCost

pytest.importorskip("aiconfigurator_core")

CELL = Cell("llama-3.1-8b", "h100", "synth:chat:poisson", "tight")


def test_objectives_are_multiples_of_what_the_gpu_takes() -> None:
    study = Study(CELL, requests=20)
    loose = Study(Cell("llama-3.1-8b", "h100", CELL.trace, "loose"), requests=20)
    papers = Study(Cell("llama-3.1-8b", "h100", CELL.trace, "papers"), requests=20)
    assert papers.slo.tpot_ms == 50.0 and papers.slo.ttft_ms == study.slo.ttft_ms >= 200.0
    assert loose.slo.tpot_ms == pytest.approx(4.0 * study.slo.tpot_ms, rel=0.02)
    assert loose.slo.ttft_ms >= papers.slo.ttft_ms and study.slo.itl_ms == 2.0 * study.slo.tpot_ms
    cost = SiliconCost(DIMENSIONS[CELL.model], CELL.gpu)
    empty = 1e3 * cost(Shape.decode(32, 32), 132, Shape(), 0)
    assert 1.25 * empty < study.slo.tpot_ms < 2.5 * empty


def test_shares_become_the_nearest_split_and_other_policies_stay() -> None:
    study = Study(CELL, requests=20)
    assert study.spec("static:75/25") == "static:96/36" and study.spec("chunked:64") == "chunked:64"
    assert study.spec("smpart:split=75/25+refuse") == "smpart:split=96/36+refuse"


def test_every_variant_of_the_ablations_is_a_policy_here() -> None:
    study, script = Study(CELL, requests=20), Path(__file__).parents[2] / "examples" / "ablations.py"
    for policy, _ in runpy.run_path(str(script))["VARIANTS"].values():
        study.deployment.core(study.spec(policy), study.slo)


def test_a_capacity_holds_and_is_searched_on_every_window() -> None:
    study = Study(CELL, requests=8, windows=2)
    record = study.capacity("chunked").record
    held = [trial for trial in record["trials"] if trial["slo_attainment"] >= 0.9 and not trial["queue_grows"]]
    assert record["capacity_rps"] == max((trial["rate"] for trial in held), default=0.0) > 0.0
    assert study.at("chunked", record["capacity_rps"], seed=1).record["seed"] == 1


def test_geometric_means_leave_out_what_is_nobodys() -> None:
    assert geometric([2.0, 8.0, float("inf"), 0.0]) == 4.0 and geometric([]) is None
