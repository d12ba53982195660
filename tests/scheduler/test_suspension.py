"""Best-effort readers stay out of steps that others would pay for, and are never forgotten."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from chaos import prompts
from test_core_virtual import ask, assert_nothing_held, drain
from test_steady import Scaling, make

from smpart.scheduler import SLO, make_policy
from smpart.scheduler.choice import Choice, choose
from smpart.scheduler.costs import Costs
from smpart.scheduler.demand import Demand
from smpart.scheduler.memory import giving_way
from smpart.scheduler.pace import BEST_EFFORT_GAPS
from smpart.scheduler.snapshot import Snapshot
from smpart.scheduler.suspension import awake
from smpart.scheduler.table import State
from tests.scheduler.still import begun, decoding, still, waiting


def steps(snapshot: Snapshot) -> list[int]:
    costs = Costs()
    costs.tick(snapshot.predictor, snapshot.units)
    return awake(snapshot, costs, snapshot.running).tolist()


def seen(snapshot: Snapshot) -> Demand:
    """What the choice is made by."""
    found: list[Demand] = []

    def listen(*arguments: Any) -> Choice:
        found.append(arguments[4])
        return choose(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("smpart.scheduler.policies.smpart.choose", listen)
        make_policy("smpart").plan(snapshot)
    return found[0]


READERS = [decoding(500), decoding(600, best_effort=True), decoding(700)]


def test_nobody_stays_out_where_nobody_waits_or_all_are_best_effort() -> None:
    assert steps(still(READERS)) == [0, 1, 2]
    assert steps(still([decoding(500), decoding(600), waiting(100)])) == [0, 1]
    assert steps(still([*READERS, waiting(100, best_effort=True)])) == [0, 1, 2]


@pytest.mark.parametrize("newcomer", [waiting(100), begun(1000, 100)])
def test_they_stay_out_while_others_wait_for_a_first_token(newcomer: dict) -> None:
    assert steps(still([*READERS, newcomer])) == [0, 2]


def test_each_gets_a_token_every_so_often_whoever_waits() -> None:
    old = decoding(600, best_effort=True, last_token=1.0 - BEST_EFFORT_GAPS * 0.1 - 1e-6)
    assert steps(still([decoding(500), old, waiting(100)])) == [0, 1]


def test_as_many_as_the_pace_allows_take_turns() -> None:
    lasts = np.linspace(0.9, 0.99, 200)
    rows = [decoding(3000, tpot=0.02)] + [decoding(3000, best_effort=True, last_token=t) for t in lasts]
    taken = steps(still(rows))
    assert taken[0] == 0 and 1 < len(taken) < len(rows)
    assert taken[1:] == list(range(1, len(taken)))  # those whose last token is oldest


def test_plans_keep_who_stays_out_also_where_no_prompt_can_start() -> None:
    rows = [decoding(3000, tpot=0.02)] + [decoding(3000, best_effort=True, last_token=0.95) for _ in range(200)]
    snapshot = still(rows)
    plan = make_policy("smpart").plan(snapshot)
    assert plan.step is not None and 1 < len(plan.step.rows) < len(rows)
    assert not plan.steady


@pytest.mark.parametrize(
    ("rest", "gone"),
    [
        ({"free_slots": 0}, (2,)),
        ({"free_blocks": 5}, (2,)),
        ({}, ()),
        ({"free_slots": 0, "running": np.array([0])}, ()),  # nobody to give way
    ],
)
def test_the_latest_best_effort_reader_makes_room(rest: dict, gone: tuple[int, ...]) -> None:
    rows = [decoding(500), decoding(600, best_effort=True), decoding(700, best_effort=True), waiting(400)]
    snapshot = still(rows, **rest)
    assert giving_way(snapshot, snapshot.free_blocks) == gone
    plan = make_policy("smpart").plan(snapshot)
    assert plan.preempt == gone
    others = still([*rows[:3], waiting(400, best_effort=True)], **rest)
    assert giving_way(others, others.free_blocks) == ()


def test_nobody_else_makes_room_while_one_is_on_its_way_out() -> None:
    leaving = decoding(700, best_effort=True, state=State.LEAVING)
    rows = [decoding(500), decoding(600, best_effort=True), leaving, waiting(400)]
    assert giving_way(still(rows, free_slots=0), 0) == ()


def test_prompts_of_best_effort_are_no_promise() -> None:
    for best_effort in (False, True):
        line = [waiting(800, arrival=0.99, ttft_deadline=1.5, best_effort=best_effort) for _ in range(3)]
        demand = seen(still([decoding(3000), *line]))
        assert demand.work and set(demand.weight) == {0 if best_effort else 1}


@pytest.mark.parametrize("seed", range(3))
def test_no_gap_is_longer_than_promised_and_interactive_requests_hardly_notice(seed: int) -> None:
    objectives = SLO(ttft_ms=100, tpot_ms=5)

    def serve(share: float) -> tuple[list, list]:
        rng = np.random.default_rng(seed)
        core = make(make_policy("smpart", slo=objectives), -math.inf, 4000, Scaling)
        requests = [
            ask(i, prompt, 30, arrival=0.004 * i, best_effort=bool(i % 4 == 3))
            for i, prompt in enumerate(prompts(rng, 120, 120))
        ]
        requests = [request for request in requests if share or not request.best_effort]
        for request in requests:
            request.slo = objectives
            while core.now() < request.arrival:
                core.turn(request.arrival)
            core.add(request)
        drain(core)
        assert_nothing_held(core)
        theirs = [request for request in requests if request.best_effort]
        return [request for request in requests if not request.best_effort], theirs

    alone, _ = serve(0.0)
    beside, best_effort = serve(1.0)
    stayed = [request for request in best_effort if not request.preemptions]
    gaps = np.concatenate([np.diff(request.times) for request in stayed])
    assert gaps.max() <= BEST_EFFORT_GAPS * 2e-3 * objectives.tpot_ms + 0.02
    waits = [np.mean([r.times[0] - r.arrival for r in requests]) for requests in (alone, beside)]
    assert waits[1] < 2.0 * waits[0]
