"""Every policy under random load on the engine double, which fails on any breach of the contract."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from smpart.partition import Shape, Split
from smpart.partition.feasible import overlapping_splits
from smpart.predictor import OnlinePredictor
from smpart.scheduler import SLO, make_policy, policy_names
from tests.scheduler.double import Ask, Double, Oracle, cpu_cost, goodput, gpu_cost
from tests.scheduler.still import begun, crowd, decoding, still, waiting

POLICIES = [
    "chunked", "chunked:24", "mixed", "static:1/1", "smpart", "smpart:refuse",
    "smpart:no-slack+no-preemption+period=500", "smpart:split=1/1", "pdmux", "muxwise", "chunked+slack",
    "nexus", "bullet", "semipd", "duet:100", "overlap", "disagg",
]  # fmt: skip


class Flat:
    """A prior that is wrong about everything."""

    units = 2

    def seconds(self, shape: Shape, units: int) -> float:
        return 1.0 + 0.01 * shape.tokens

    def contention(self, shape: Shape, units: int, neighbour: Shape, neighbour_units: int) -> float:
        return 1.0

    def both_sides(self, step: Shape, head: Shape, splits: tuple[Split, ...]) -> np.ndarray:
        return np.array([[self.seconds(shape, split.decode) for split in splits] for shape in (step, head)])

    def margin(self, shape: Shape, beside: bool) -> float:
        return 0.25


asks = st.lists(
    st.builds(
        Ask,
        arrival=st.floats(0, 20),
        prompt=st.integers(1, 180),
        outputs=st.integers(1, 24),
        max_tokens=st.just(24),
        slo=st.sampled_from([SLO(500, 150), SLO(3000, 400), SLO(20_000, 2000)]),
        best_effort=st.booleans(),
    ),
    min_size=1,
    max_size=14,
)


def test_every_policy_is_held_to_the_contract() -> None:
    assert {name.partition(":")[0] for name in POLICIES} == set(policy_names())


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    asks=asks,
    blocks=st.sampled_from([13, 16, 30, 4096]),
    slots=st.sampled_from([1, 3, 64]),
    lead=st.sampled_from([0.0, 0.02, 1e9]),
    paused=st.sampled_from([1, 4]),
    learns=st.booleans(),
    shares=st.booleans(),
)
def test_every_request_ends_and_no_rule_is_broken(name, asks, blocks, slots, lead, paused, learns, shares) -> None:
    predictor = OnlinePredictor(Flat()) if learns else Oracle(cpu_cost)
    double = Double(
        make_policy(name, slo=SLO(3000, 400)), asks, predictor=predictor, blocks=blocks, slots=slots, lead=lead,
        max_paused=paused, layers=6, shares=shares or name == "overlap",
    )  # fmt: skip
    for told in double.run():
        assert told.refused or len(told.times) == told.ask.outputs
        assert not told.refused or name == "smpart:refuse"


def test_a_row_that_gives_its_blocks_back_is_not_prefilled_by_the_same_plan() -> None:
    slo, small = SLO(500, 150), (1, 1, 24)
    asks = [Ask(0.0, *small, slo), Ask(0.0, *small, slo), Ask(0.0, 141, 4, 24, slo), Ask(1.0, *small, slo),
            Ask(1.0, *small, slo), Ask(0.002, 54, 1, 24, slo)]  # fmt: skip
    policy = make_policy("smpart:split=1/1", slo=SLO(3000, 400))
    double = Double(policy, asks, predictor=Oracle(cpu_cost), blocks=13, slots=3, lead=0.0, max_paused=1, layers=6)
    assert all(len(told.times) == told.ask.outputs for told in double.run())


@pytest.mark.parametrize("name", [name.replace("1/1", "96/36") for name in POLICIES])
@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10_000))
def test_no_moment_makes_a_policy_raise(name: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = [
        decoding(int(rng.integers(2, 400)), outputs=int(rng.integers(1, 9)), ahead=int(rng.integers(0, 2)),
                 flying=int(rng.integers(0, 2)), blocks=int(rng.integers(25, 40)), best_effort=bool(rng.integers(2)),
                 first_token=rng.choice([np.nan, 0.5]), last_token=rng.choice([np.nan, 0.7]))
        for _ in range(rng.integers(0, 20))
    ]  # fmt: skip
    rows += [begun(200, int(rng.integers(1, 199))) for _ in range(rng.integers(0, 3))]
    rows += [waiting(int(n), cached=int(rng.integers(0, n))) for n in rng.integers(1, 5000, rng.integers(0, 9))]
    moment = still(rows, free_blocks=int(rng.integers(0, 300)), free_slots=int(rng.integers(0, 5)))
    if name == "overlap" or (name == "semipd" and rng.integers(2)):
        moment = replace(moment, overlapping=overlapping_splits(moment.splits))
    if name == "disagg":
        moment = replace(moment, splits=(Split(132, 132),), decode_blocks=int(rng.integers(0, 300)))
    split = make_policy(name).plan(moment).split
    assert split in moment.splits or split in moment.overlapping


STARVES = {"bullet", "nexus:15"}
"""Rules that let shorter prompts pass without end; their modules say so."""


@pytest.mark.parametrize(
    "name", ["chunked", "mixed", "static:96/36", "pdmux", "muxwise", "nexus", "nexus:15", "bullet",
             "semipd", "duet", "overlap", "disagg"],
)  # fmt: skip
def test_under_overload_a_document_waits_no_longer_than_the_rule_says(name: str) -> None:
    """Questions use up all that prefill can do; unless its rule starves the document, it is not the last to begin."""
    slo = SLO(500, 60)
    asks = [Ask(0.1, 20_000, 2, slo=slo), *[Ask(0.022 * i, 900, 2, slo=slo) for i in range(120)]]
    policy = make_policy(name, slo=slo)
    told = Double(
        policy, asks, cost=gpu_cost, units=132, step=12, blocks=30_000, layers=32, check=False, shares=name == "overlap"
    ).run()
    document = next(t for t in told if t.ask.prompt == 20_000)
    behind = sum(t.times[0] > document.times[0] for t in told)
    assert behind == 0 if name in STARVES else behind > 3, behind


@pytest.mark.parametrize("name", ["smpart", "chunked+slack"])
def test_a_stream_of_short_questions_does_not_keep_a_document_out_for_ever(name: str) -> None:
    slo = SLO(500, 60)
    questions = [Ask(0.04 * i, 700, 4, slo=slo) for i in range(250)]
    double = Double(
        make_policy(name, slo=slo), [Ask(0.1, 60_000, 4, slo=slo), *questions], cost=gpu_cost, units=132, step=12,
        blocks=30_000, layers=32, check=False,
    )  # fmt: skip
    told = double.run()
    document = next(t for t in told if t.ask.prompt == 60_000)
    alone = gpu_cost(Shape.prefill([(60_000, 0)]), 132, Shape())
    assert document.times[0] - 0.1 < 12 * alone
    assert double.longest_pause < 4 * slo.ttft_ms / 1e3
    assert goodput([t for t in told if t is not document]) > 0.9


def test_a_question_does_not_wait_behind_a_document() -> None:
    slo = SLO(500, 60)
    double = Double(
        make_policy("smpart", slo=slo), [Ask(0.0, 100_000, 4, slo=slo), Ask(0.5, 600, 8, slo=slo)], cost=gpu_cost,
        units=132, step=12, blocks=30_000, layers=32,
    )  # fmt: skip
    document, question = double.run()
    assert question.good
    assert question.times[-1] < document.times[0]


def test_overload_saves_whom_it_can() -> None:
    """Twice of what the device can prefill: first come, first served would save nobody after the first seconds."""
    slo = SLO(500, 60)
    rng = np.random.default_rng(0)
    asks = [Ask(0.05 * i, int(rng.integers(1000, 5000)), 4, slo=slo) for i in range(160)]
    kinds = {"cost": gpu_cost, "units": 132, "step": 12, "blocks": 30_000, "layers": 32, "check": False}
    ours = goodput(Double(make_policy("smpart", slo=slo), asks, **kinds).run())
    theirs = goodput(Double(make_policy("chunked", slo=slo), asks, **kinds).run())
    assert ours > 0.35
    assert ours > 2 * theirs


def test_best_effort_yields_to_interactive() -> None:
    slo = SLO(1000, 60)
    asks = [Ask(0.0, 8000, 4, slo=slo, best_effort=True) for _ in range(10)] + [Ask(0.3, 600, 8, slo=slo)]
    double = Double(make_policy("smpart", slo=slo), asks, cost=gpu_cost, units=132, step=12, blocks=30_000, layers=32)
    told = double.run()
    assert told[-1].good
    assert sum(t.times[0] < told[-1].times[0] for t in told[:-1]) < 8


@pytest.mark.parametrize("running", [256])
def test_the_cost_of_a_decision(benchmark, running: int) -> None:
    policy = make_policy("smpart")
    snapshot = still(crowd(running, 64), free_blocks=200_000, free_slots=64)
    plan = benchmark.pedantic(policy.plan, args=(snapshot,), rounds=300, warmup_rounds=5)
    assert plan.step is not None
