"""Steps that follow themselves: fewer questions, and the same run."""

from __future__ import annotations

import math

import numpy as np
import pytest
from chaos import prompts
from hypothesis import given, settings
from hypothesis import strategies as st
from test_core_virtual import ask, assert_nothing_held, drain

from smpart.engine.core import EngineCore
from smpart.engine.ghost import GhostBoard, GhostBody
from smpart.engine.request import Request
from smpart.kvcache import BlockPool
from smpart.partition import Device, ModelShape, Shape, Split
from smpart.partition.feasible import feasible_splits
from smpart.partition.sim import SimLanes
from smpart.predictor import OnlinePredictor, RooflinePrior
from smpart.scheduler import make_policy
from smpart.scheduler.memory import fit_decode
from smpart.scheduler.plan import Piece, Plan, Policy, ResumePrefill, StartPrefill, Step
from smpart.scheduler.snapshot import Snapshot

UNITS, BLOCKS, SLOTS = 8, 40, 8
DEVICE = Device("sim", "sim", UNITS, tuple(range(UNITS)), 1 << 30)
MODEL = ModelShape(4, 64, 4, 4, 16, 1000, 1 << 20, 1 << 16, 1 << 21, 2)
STEADY = ["chunked:64", "chunked+slack", "static:4/4", "overlap", "pdmux", "muxwise", "nexus", "bullet", "smpart"]


class Fixed(OnlinePredictor):
    """Learns nothing: what a policy remembers of its answers is not older where it is asked less often."""

    def observe(self, shape: Shape, units: int, neighbour: Shape, fraction: float, seconds: float) -> None:
        pass


class Scaling(RooflinePrior):
    """Every unit counts: decode alone has the whole device."""

    def seconds(self, shape: Shape, units: int) -> float:
        return cost(shape, units, Shape(), 0)


class Counted:
    """A policy, and how often it is asked."""

    def __init__(self, policy: Policy) -> None:
        self._policy, self.name, self.asked = policy, policy.name, 0

    def plan(self, snapshot: Snapshot) -> Plan:
        self.asked += 1
        return self._policy.plan(snapshot)


class Unsteady(Counted):
    """A policy whose plans are good for one launch."""

    def plan(self, snapshot: Snapshot) -> Plan:
        plan = super().plan(snapshot)
        return Plan(
            plan.split, plan.prefill, plan.step, plan.preempt, plan.abandon, plan.refuse, valid_until=plan.valid_until
        )


def cost(shape: Shape, units: int, neighbour: Shape, neighbour_units: int) -> float:
    slower = 1.2 if neighbour_units else 1.0
    share = UNITS / units
    return slower * (5e-4 * (1.0 + share) + 1e-5 * shape.prefill_tokens * share + 1e-7 * shape.decode_context)


def make(policy: Policy, lead: float, blocks: int = BLOCKS, prior: type[RooflinePrior] = RooflinePrior) -> EngineCore:
    lanes = SimLanes(DEVICE, feasible_splits(UNITS), cost, GhostBody)
    predictor = Fixed(prior(MODEL, DEVICE))
    pool, board = BlockPool(blocks, 16), GhostBoard(SLOTS, 256)
    return EngineCore(lanes, policy, predictor, pool, board, layers=4, lead_s=lead)


def serve(core: EngineCore, seed: int, gap: float = 0.02) -> list[Request]:
    """Requests at random moments, at some of which another is cancelled; memory or slots run out now and then."""
    rng = np.random.default_rng(seed)
    moments = np.cumsum(rng.exponential(gap, 24)).tolist()
    requests = [
        ask(i, prompt, int(rng.integers(1, 90)), arrival=moment)
        for i, (prompt, moment) in enumerate(zip(prompts(rng, 24, 120), moments, strict=True))
    ]
    for request in requests:
        while core.now() < request.arrival:
            core.turn(request.arrival)
        core.add(request)
        if rng.random() < 0.2:
            core.cancel(requests[int(rng.integers(0, request.id + 1))])
    drain(core)
    assert_nothing_held(core)
    return requests


@pytest.mark.parametrize("spec", STEADY)
@settings(max_examples=4)
@given(
    seed=st.integers(0, 10_000),
    lead=st.sampled_from([-math.inf, 0.0, math.inf]),
    blocks=st.sampled_from([BLOCKS, 10 * BLOCKS]),
)
def test_a_policy_that_is_asked_less_often_serves_the_same(spec: str, seed: int, lead: float, blocks: int) -> None:
    seldom, always = Counted(make_policy(spec)), Unsteady(make_policy(spec))
    steady, asked = make(seldom, lead, blocks), make(always, lead, blocks)
    served, expected = serve(steady, seed), serve(asked, seed)
    assert [r.times for r in served] == [r.times for r in expected]
    assert [r.preemptions for r in served] == [r.preemptions for r in expected]
    assert [s[:5] for s in steady.log.spans] == [s[:5] for s in asked.log.spans]
    assert steady.log.bubble == pytest.approx(asked.log.bubble)
    assert seldom.asked <= always.asked


@pytest.mark.parametrize("spec", ["chunked:64", "static:4/4"])
def test_steady_plans_save_questions(spec: str) -> None:
    seldom, always = Counted(make_policy(spec)), Unsteady(make_policy(spec))
    for policy in (seldom, always):
        for seed in range(3):
            serve(make(policy, -math.inf), seed)
    assert seldom.asked < 0.8 * always.asked


@pytest.mark.parametrize("seed", range(3))
def test_nobody_is_asked_while_whoever_waits_finds_no_slot(seed: int) -> None:
    seldom, always = Counted(make_policy("smpart")), Unsteady(make_policy("smpart"))
    steady, asked = (make(policy, -math.inf, 10 * BLOCKS, Scaling) for policy in (seldom, always))
    served, expected = serve(steady, seed, 0.002), serve(asked, seed, 0.002)
    assert [r.times for r in served] == [r.times for r in expected]
    assert seldom.asked < 0.5 * always.asked


class Once:
    """Lets every step follow itself and counts how often it is asked for one."""

    name = "once"

    def __init__(self) -> None:
        self.asked = 0

    def plan(self, snapshot: Snapshot) -> Plan:
        if snapshot.waiting.size and snapshot.free_blocks > 2:
            row = int(snapshot.waiting[0])
            return Plan(Split(UNITS, 0), StartPrefill((Piece(row, int(snapshot.table.known[row])),)))
        if not snapshot.running.size:
            return Plan(snapshot.split)
        self.asked += 1
        fit = fit_decode(snapshot)
        return Plan(Split(0, UNITS), step=Step(tuple(fit.rows.tolist())), preempt=fit.preempt, steady=True)


@pytest.mark.parametrize("lead", [-math.inf, math.inf])
def test_a_steady_step_ends_at_the_output_limit(lead: float) -> None:
    core = make(policy := Once(), lead)
    core.add(request := ask(0, range(20), 50))
    while not core.state.table.outputs.any():
        core.turn()
    before = policy.asked
    drain(core)
    assert len(request.token_ids) == 50
    assert policy.asked - before <= 2
    assert core.log.steps == 49, "no step beyond the limit"


def test_a_steady_step_ends_when_somebody_comes() -> None:
    core = make(policy := Once(), -math.inf)
    core.add(ask(0, range(20), 50))
    for _ in range(20):
        core.turn()
    assert policy.asked == 1
    core.add(ask(1, range(20), 5))
    core.turn()
    assert core.state.line.target == Split(UNITS, 0), "the policy saw it and wants to prefill"
    drain(core)


def test_a_steady_step_ends_when_blocks_run_out() -> None:
    core = make(policy := Once(), -math.inf)
    core.add(request := ask(0, range(20), 200))
    while not request.token_ids:
        core.turn()
    held = core.state.pool.allocate(core.state.pool.free)
    while policy.asked < 2:
        core.turn()
    assert request.preemptions == 0 and core.state.table.preemptions.max() == 1
    assert len(request.token_ids) == 32 - 20 + 1, "as far as its blocks went"
    core.state.pool.release(held)
    drain(core)
    assert len(request.token_ids) == 200


def test_a_forward_goes_on_beside_a_step_without_a_question_until_the_step_ends() -> None:
    """Layers of 10 ms beside steps of 25 ms on half of the units each."""

    def slow(shape: Shape, units: int, neighbour: Shape, neighbour_units: int) -> float:
        return 0.04 if shape.prefill_tokens else 0.025

    class Beside:
        name = "beside"

        def __init__(self) -> None:
            self.asked: list[float] = []

        def plan(self, snapshot: Snapshot) -> Plan:
            self.asked.append(snapshot.now)
            if not snapshot.running.size:
                row = int(snapshot.waiting[0]) if snapshot.waiting.size else -1
                start = StartPrefill((Piece(row, 20),)) if row >= 0 else None
                return Plan(Split(UNITS, 0), start)
            split = Split(UNITS // 2, UNITS // 2)
            step = Step(tuple(snapshot.running.tolist())) if snapshot.decode_lane.room else None
            if snapshot.forwards and snapshot.forwards[0].layers_left:
                prefill = ResumePrefill(snapshot.forwards[0].id, 1) if snapshot.prefill_lane.room else None
                return Plan(split, prefill, step, onward=True)
            waits = snapshot.waiting.size and snapshot.prefill_lane.room
            return Plan(split, StartPrefill((Piece(int(snapshot.waiting[0]), 20),), 1) if waits else None, step)

    lanes = SimLanes(DEVICE, feasible_splits(UNITS), slow, GhostBody)
    policy, pool, board = Beside(), BlockPool(BLOCKS, 16), GhostBoard(SLOTS, 256)
    core = EngineCore(
        lanes, policy, Fixed(RooflinePrior(MODEL, DEVICE)), pool, board, layers=4, lead_s=-math.inf, prefix_cache=False
    )
    core.add(ask(0, range(20), 9))
    while not core.state.table.outputs.any():
        core.turn()
    core.add(ask(1, range(20), 2))
    begun = core.now()
    drain(core)
    groups = [(span.started - begun, span.finished - begun) for span in core.log.spans if span.kind == "prefill"][1:]
    assert groups == [pytest.approx((0.01 * n, 0.01 * (n + 1))) for n in range(4)], "no gap between them"
    within = [moment - begun for moment in policy.asked if begun < moment < begun + 0.025]
    assert within == [pytest.approx(0.01)], "asked when the first group ended, which it had started, and no more"
