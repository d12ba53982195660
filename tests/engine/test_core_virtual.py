"""The loop in virtual time: every request ends, and nothing it held stays behind."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from chaos import Chaos, Constant, prompts
from hypothesis import given, settings
from hypothesis import strategies as st

from smpart.engine.core import EngineCore
from smpart.engine.ghost import GhostBoard, GhostBody
from smpart.engine.request import FinishReason, Request
from smpart.errors import SmpartError, UsageError
from smpart.kvcache import BlockPool
from smpart.partition import Device, Shape, Split
from smpart.partition.feasible import feasible_splits
from smpart.partition.sim import SimLanes
from smpart.predictor.estimate import NOTHING
from smpart.runtime.sampling import SamplingParams
from smpart.scheduler.plan import Piece, Plan, ResumePrefill, StartPrefill, Step
from smpart.scheduler.registry import make_policy
from smpart.scheduler.slo import SLO


def cost(shape: Shape, units: int, neighbour: Shape, neighbour_units: int) -> float:
    return (1e-3 + 1e-5 * shape.tokens * 4 / units) * (1.2 if neighbour_units else 1.0)


def make_core(
    policy, units: int = 4, blocks: int = 64, slots: int = 8, max_len: int = 256, lead: float = float("-inf")
):
    device = Device("sim", "sim", units, tuple(range(units)), 1 << 30)
    lanes = SimLanes(device, feasible_splits(units), cost, GhostBody)
    pool = BlockPool(blocks, 16)
    return EngineCore(lanes, policy, Constant(), pool, GhostBoard(slots, max_len), layers=4, lead_s=lead)


def ask(number: int, prompt, tokens: int, **rest) -> Request:
    return Request(number, prompt, SamplingParams(max_tokens=tokens, ignore_eos=True), SLO(), **rest)


def drain(core: EngineCore, limit: int = 20_000) -> None:
    for _ in range(limit):
        if core.idle:
            return
        core.turn()
    raise AssertionError("the core never became idle")


def assert_nothing_held(core: EngineCore) -> None:
    core.state.pool.check()
    assert core.state.pool.owned == 0
    assert core.state.pool.free == core.state.pool.blocks
    assert core.state.residency.free_slots == 8
    assert len(core.state.table) == 0
    assert not core.state.forwards


@settings(max_examples=40)
@given(
    seed=st.integers(0, 10_000),
    lead=st.sampled_from([0.0, float("inf"), float("-inf")]),
    blocks=st.sampled_from([17, 24, 64]),
)
def test_every_request_ends_with_all_its_tokens_whatever_the_policy_does(seed: int, lead: float, blocks: int) -> None:
    rng = np.random.default_rng(seed)
    core = make_core(Chaos(seed), blocks=blocks, lead=lead)
    requests = [ask(i, p, int(rng.integers(1, 20))) for i, p in enumerate(prompts(rng, 12, 200))]
    cancelled = set()
    for request in requests:
        core.add(request)
        for _ in range(int(rng.integers(0, 6))):
            if not core.idle:
                core.turn()
        if rng.random() < 0.25:
            victim = requests[int(rng.integers(0, request.id + 1))]
            if not victim.finished:
                cancelled.add(victim.id)
            core.cancel(victim)
    drain(core)
    assert_nothing_held(core)
    for request in requests:
        if request.id in cancelled:
            assert request.finish_reason is FinishReason.CANCELLED
        else:
            assert request.finish_reason is FinishReason.LENGTH
            assert len(request.token_ids) == request.params.max_tokens
            assert request.times == sorted(request.times)


def test_virtual_time_is_the_cost_of_what_ran() -> None:
    core = make_core(Chaos(3, preempt=0, abandon=0))
    request = ask(0, range(32), 1)
    core.add(request)
    drain(core)
    spans = core.log.spans
    assert request.times[-1] == pytest.approx(spans[-1].finished)
    assert all(a.finished <= b.finished for a, b in itertools.pairwise(spans))


@pytest.mark.parametrize(
    ("prompt", "tokens", "word"),
    [(range(0), 1, "empty prompt"), (range(250), 10, "over the limit"), (range(120), 120, "whole pool")],
)
def test_a_request_that_can_never_be_served_is_refused_early(prompt: range, tokens: int, word: str) -> None:
    core = make_core(Chaos(0), blocks=10)
    with pytest.raises(UsageError, match=word):
        core.add(ask(0, prompt, tokens))
    assert_nothing_held(core)
    assert core.idle


def test_a_policy_that_leaves_work_lying_is_an_error_and_not_a_hang() -> None:
    class Lazy:
        name = "lazy"

        def plan(self, snapshot) -> Plan:
            return Plan(Split(4, 0))

    core = make_core(Lazy())
    core.add(ask(0, range(3), 1))
    with pytest.raises(SmpartError, match="lazy"):
        core.turn()


def test_equal_prefixes_are_computed_once() -> None:
    core = make_core(Chaos(1, preempt=0, abandon=0))
    first, second = ask(0, range(64), 2), ask(1, range(64), 2)
    core.add(first)
    drain(core)
    core.add(second)
    drain(core)
    assert (first.cached_tokens, second.cached_tokens) == (0, 48)


def test_another_salt_shares_no_prefix() -> None:
    core = make_core(Chaos(1, preempt=0, abandon=0))
    for number, salt in enumerate(("alice", "bob")):
        request = ask(number, range(64), 2, salt=salt)
        core.add(request)
        drain(core)
        assert request.cached_tokens == 0


class Raising(GhostBody):
    """Fails at the first layer group it gets, and so at every later one of that forward."""

    failed = False

    def run(self, payload):
        answer = super().run(payload)
        if payload.batch is not None and payload.layers is not None and not self.failed:
            self.failed = True
            self._paused.pop(payload.forward)
            raise RuntimeError("out of memory")
        return answer


class Ahead:
    """Launches the next layer group while the one before is in flight."""

    name = "ahead"

    def plan(self, snapshot):
        if snapshot.forwards:
            more = snapshot.forwards[0].layers_left
            return Plan(Split(4, 0), ResumePrefill(snapshot.forwards[0].id, 1) if more else None)
        if snapshot.waiting.size:
            return Plan(Split(4, 0), StartPrefill((Piece(int(snapshot.waiting[0]), 999),), 1))
        step = Step(tuple(snapshot.running.tolist())) if snapshot.running.size else None
        return Plan(Split(0, 4), step=step)


def test_a_group_that_fails_while_the_next_is_in_flight_costs_nobody_else() -> None:
    device = Device("sim", "sim", 4, tuple(range(4)), 1 << 30)
    lanes = SimLanes(device, feasible_splits(4), cost, Raising)
    core = EngineCore(lanes, Ahead(), Constant(), BlockPool(64, 16), GhostBoard(8, 256), layers=4, lead_s=float("inf"))
    core.add(first := ask(0, range(40), 5))
    while not first.finished:
        core.turn()
    core.add(second := ask(1, range(50), 5))
    drain(core)
    assert first.finish_reason is FinishReason.ERROR
    assert second.finish_reason is FinishReason.LENGTH and len(second.token_ids) == 5
    assert_nothing_held(core)


class Watching(Constant):
    """Remembers what forwards ran beside."""

    def __init__(self) -> None:
        super().__init__()
        self.beside: list[Shape] = []

    def observe(self, shape: Shape, units: int, neighbour: Shape, fraction: float, seconds: float) -> None:
        self.beside.append(neighbour)


@pytest.mark.parametrize(("name", "told"), [("overlap", False), ("static:2/2", True)])
def test_lanes_that_share_units_teach_nothing_about_lanes_that_do_not(name: str, told: bool) -> None:
    """Nor does a profile look untrue because two streams on the same SMs are slower than it says."""
    device = Device("sim", "sim", 4, tuple(range(4)), 1 << 30)
    lanes = SimLanes(device, feasible_splits(4), cost, GhostBody)
    policy, watching = make_policy(name, splits=lanes.splits(), overlapping=lanes.overlapping()), Watching()
    pool, board = BlockPool(64, 16), GhostBoard(8, 256)
    core = EngineCore(lanes, policy, watching, pool, board, layers=4, lead_s=float("-inf"))
    for number in range(8):
        core.add(ask(number, range(150), 30))
        core.turn()
    drain(core)
    assert watching.beside and any(shape != NOTHING for shape in watching.beside) == told
