"""What the controller does when more comes than it can serve."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from smpart.partition import Shape
from smpart.scheduler import SLO, make_policy
from smpart.scheduler.pace import Readers
from smpart.scheduler.plan import ResumePrefill, StartPrefill
from smpart.scheduler.snapshot import ForwardView, Snapshot
from tests.scheduler.double import Oracle
from tests.scheduler.still import begun, decoding, still, waiting

LONG = 12_000


def beside_a_long_one(*, passed: bool = False) -> Snapshot:
    """A paused forward of a long prompt that is late, and two short prompts that are due before its end."""
    rows = [begun(LONG, LONG, ttft_deadline=0.5, slot=1), begun(900, 900, ttft_deadline=1.2, slot=2)][: 1 + passed]
    rows = [*rows, *[waiting(300, arrival=0.95, ttft_deadline=1.15)] * 2]
    forwards = [ForwardView(1, (0,), (LONG,), Shape.prefill([(LONG, 0)]), 31, 0, 0.9)]
    if passed:
        forwards.append(ForwardView(2, (1,), (900,), Shape.prefill([(900, 0)]), 31, 0, 0.95))
    made = still(rows, forwards=tuple(forwards))
    made.table.forward[: len(forwards)] = [forward.id for forward in forwards]
    return replace(made, prefilling=np.zeros(0, dtype=np.intp))


def test_a_short_prompt_is_not_given_up_for_a_forward_that_is_late_anyhow() -> None:
    plan = make_policy("smpart", slo=SLO(200, 50)).plan(beside_a_long_one())
    assert isinstance(plan.prefill, StartPrefill)
    assert [piece.row for piece in plan.prefill.pieces] == [1]


@pytest.mark.parametrize(("policy", "passed"), [("smpart", True), ("smpart:no-preemption", False)])
def test_but_it_waits_where_it_may_not_pass(policy: str, passed: bool) -> None:
    plan = make_policy(policy, slo=SLO(200, 50)).plan(beside_a_long_one(passed=passed))
    assert isinstance(plan.prefill, ResumePrefill)


def test_to_be_behind_costs_the_more_the_longer_steps_have_been() -> None:
    policy = make_policy("smpart", slo=SLO(200, 50))
    snapshot = still([decoding(300, outputs=3)] * 8)
    readers = Readers(snapshot.table, snapshot.running)

    def price(begin: float) -> float:
        return policy._paces(snapshot, readers, begin, alone=0.02)[1]

    idle = price(begin=1.0)
    for step in range(100):
        policy._lately.chosen(1.0 + 0.065 * step, 0.065, memory=1.0)
    assert price(begin=1.0 + 0.065 * 100) > 4 * idle
    assert price(begin=60.0) == pytest.approx(idle, rel=0.01)


def waits_for_each_operator(shape: Shape, units: int, beside: Shape) -> float:
    """Cores that others use too: a forward takes a second, whatever it computes, and 4 ms a token."""
    return 1.0 + 4e-3 * (shape.prefill_tokens + shape.decode_batch)


@pytest.mark.parametrize("readers", [0, 2])
def test_no_chunk_is_cut_so_short_that_it_is_mostly_what_every_forward_costs(readers: int) -> None:
    slo = SLO(ttft_ms=14_800, tpot_ms=214)
    rows = [decoding(200, tpot=0.214, itl=0.428)] * readers + [waiting(6000, ttft_deadline=15.0)]
    snapshot = still(rows, units=2, step=1, layers=30, predictor=Oracle(waits_for_each_operator))
    plan = make_policy("smpart", slo=slo).plan(snapshot)
    pieces = plan.prefill.pieces if isinstance(plan.prefill, StartPrefill) else plan.step.pieces
    (piece,) = pieces
    assert 4e-3 * piece.length > 1.0
