"""Rules of the baselines, pinned to worked examples from their papers and code (vLLM V1, SGLang, pegainfer, pdmux)."""

from __future__ import annotations

import pytest

from smpart.errors import UsageError
from smpart.partition import Shape, Split
from smpart.scheduler import SLO, make_policy, policy_names
from smpart.scheduler.plan import Piece, Plan, StartPrefill
from smpart.scheduler.snapshot import ForwardView
from tests.scheduler.double import Oracle, cpu_cost, gpu_cost
from tests.scheduler.still import begun, decoding, still, waiting


def test_chunked_gives_what_is_left_of_the_budget_to_the_partial_prompt_and_the_next() -> None:
    policy = make_policy("chunked:2048")
    rows = [decoding(100)] * 100
    plan = policy.plan(still([*rows, begun(2000, 500), waiting(1000)]))
    assert len(plan.step.rows) == 100
    assert [piece.length for piece in plan.step.pieces] == [1500, 448]
    plan = policy.plan(still([*rows, decoding(2001), begun(1000, 448)]))
    assert len(plan.step.rows) == 101
    assert [piece.length for piece in plan.step.pieces] == [552]


def test_chunked_preempts_the_tail_even_if_that_is_the_row_itself_and_admits_nobody() -> None:
    rows = [decoding(17, blocks=1), decoding(33, blocks=2), decoding(49, blocks=3), waiting(8)]
    plan = make_policy("chunked").plan(still(rows, free_blocks=2))
    assert len(plan.step.rows) == 2
    assert len(plan.preempt) == 1
    assert plan.preempt[0] not in plan.step.rows
    assert not plan.step.pieces


def test_chunked_reads_a_prefix_hit_as_computed_but_always_computes_the_last_token() -> None:
    plan = make_policy("chunked").plan(still([waiting(64, cached=48), waiting(64, cached=64)]))
    assert [piece.length for piece in plan.step.pieces] == [16, 1]


@pytest.mark.parametrize(("ratio", "admitted"), [(0.7, False), (0.5, True)])
def test_mixed_sets_memory_aside_for_the_answers_of_running_requests(ratio: float, admitted: bool) -> None:
    policy = make_policy("mixed")
    policy.ratio = ratio
    rows = [decoding(11, max_tokens=101, blocks=2) for _ in range(8)]
    plan = policy.plan(still([*rows, waiting(4000, max_tokens=500)], free_blocks=500, block_tokens=10))
    assert (plan.prefill is not None) == admitted
    assert (plan.step is None) == admitted
    assert plan.split == (Split(132, 0) if admitted else Split(0, 132))


def test_mixed_lowers_its_ratio_by_steps_that_really_ran() -> None:
    policy = make_policy("mixed")
    snapshot = still([decoding(11, blocks=4)])
    policy.plan(snapshot)
    policy.plan(snapshot)
    assert policy.ratio == 0.7
    for _ in range(600):
        policy.plan(snapshot)
        snapshot.table.computed[snapshot.running] += 1
        snapshot.table.blocks[snapshot.running] += 1
    policy.plan(snapshot)
    assert policy.ratio == pytest.approx(0.098)


def test_mixed_retracts_who_said_least_until_each_survivor_has_twenty_tokens() -> None:
    rows = [
        decoding(161, outputs=10, blocks=10, prompt=151), decoding(161, outputs=2, blocks=10, prompt=159),
        decoding(161, outputs=2, blocks=10, prompt=140), decoding(161, outputs=30, blocks=10, prompt=131),
    ]  # fmt: skip
    policy = make_policy("mixed")
    plan = policy.plan(still(rows, free_blocks=0))
    assert len(plan.preempt) == 1
    assert plan.step is not None
    assert len(plan.step.rows) == 3
    snapshot = still(rows, free_blocks=0)
    assert snapshot.table.prompt[plan.preempt[0]] == 159
    assert policy.ratio == pytest.approx((10 + 2 + 30 + 3 * 20) / 300)


def test_static_splits_only_while_both_phases_have_work() -> None:
    policy = make_policy("static:96/36")
    both = policy.plan(still([decoding(100), waiting(8192), waiting(10)]))
    assert both.split == Split(96, 36)
    assert both.step.rows
    assert isinstance(both.prefill, StartPrefill)
    assert [piece.length for piece in both.prefill.pieces] == [8192]
    assert both.prefill.layers == 8  # pdmux: 65,536 // 8,192
    assert policy.plan(still([decoding(100)])).split == Split(0, 132)
    assert policy.plan(still([waiting(100)])).split == Split(132, 0)


def test_a_policy_is_found_by_name_and_a_bad_one_is_refused_in_one_line() -> None:
    assert {"chunked", "mixed", "smpart", "static"} <= set(policy_names())
    for bad in ("nonsense", "", "chunked:0", "chunked:x", "static", "static:0/2", "static:a", "mixed:-1", "smpart:x",
                "chunked+slack:x", "pdmux:x", "muxwise:x", "nexus:0", "bullet:x", "semipd:101", "duet:x"):  # fmt: skip
        with pytest.raises(UsageError) as caught:
            make_policy(bad)
        assert "\n" not in str(caught.value)
    with pytest.raises(UsageError, match="bullet, chunked, "):
        make_policy("nonsense")
    with pytest.raises(UsageError, match="1/1"):
        make_policy("static:3/1", splits=(Split(0, 2), Split(1, 1), Split(2, 0)))


def test_smpart_lets_a_lone_phase_have_the_device() -> None:
    policy = make_policy("smpart")
    assert policy.plan(still([decoding(100)])).split == Split(0, 132)
    plan = policy.plan(still([waiting(100)]))
    assert plan.split == Split(132, 0)
    assert plan.prefill.pieces == (Piece(0, 100),)


def test_smpart_splits_when_a_hybrid_step_would_break_the_pace_and_says_why() -> None:
    slo = SLO(3000, 300)
    rows = [decoding(100, tpot=0.3, itl=0.6, first_token=1.0, last_token=1.0) for _ in range(8)]
    queue = [waiting(400, ttft_deadline=12.0)]
    kinds = {"units": 2, "step": 1, "layers": 30, "predictor": Oracle(cpu_cost)}
    plan = make_policy("smpart", slo=slo).plan(still(rows + queue, **kinds))
    assert plan.split == Split(1, 1)
    assert plan.step.rows
    assert [piece.row for piece in plan.prefill.pieces] == [8]
    assert "9/9 in time" in plan.reason


def test_smpart_takes_the_hybrid_step_when_the_split_would_be_late_with_the_prompt() -> None:
    rows = [decoding(100, tpot=1.5, itl=3.0, first_token=1.0, last_token=1.0) for _ in range(8)]
    queue = [waiting(600, ttft_deadline=3.1)]
    kinds = {"units": 2, "step": 1, "layers": 30, "predictor": Oracle(cpu_cost)}
    plan = make_policy("smpart", slo=SLO(3000, 1500)).plan(still(rows + queue, **kinds))
    assert plan.split.exclusive
    assert "9/9 in time" in plan.reason


def test_smpart_bursts_while_readers_have_time_and_steps_before_they_stutter() -> None:
    slo = SLO(3000, 600)
    kinds = {"units": 2, "step": 1, "layers": 30, "predictor": Oracle(cpu_cost)}
    policy = make_policy("smpart", slo=slo)

    def plan(now: float) -> Plan:
        rows = [decoding(100, outputs=1, tpot=0.6, itl=1.2, first_token=1.0, last_token=1.0) for _ in range(4)]
        return policy.plan(still([*rows, waiting(900, ttft_deadline=4.0)], now=now, **kinds))

    early = plan(1.0)
    assert early.split == Split(2, 0) and early.step is None and early.prefill is not None
    late = plan(1.5)
    assert late.split.decode > 0 and late.step is not None


def test_smpart_lets_readers_fall_behind_a_little_where_that_saves_prompts() -> None:
    readers = [decoding(1000, outputs=100, tpot=0.0085, itl=0.018, first_token=0.152, last_token=0.999)] * 8
    prompts = [waiting(1500, ttft_deadline=1.13) for _ in range(2)]
    dear = Oracle(lambda shape, units, beside: gpu_cost(shape, units, beside) * (3.0 if shape.hybrid else 1.0))
    plan = make_policy("smpart", slo=SLO(200, 8.5)).plan(still([*readers, *prompts], predictor=dear))
    assert plan.prefill is not None and plan.split.prefill > 60
    assert "10/10 in time" in plan.reason


@pytest.mark.parametrize(("tpot", "admits"), [(0.0105, False), (0.0030, True)])
def test_smpart_holds_newcomers_back_while_its_batch_is_too_large_for_the_pace(tpot: float, admits: bool) -> None:
    readers = [decoding(4000, tpot=tpot, itl=2 * tpot, first_token=0.9, last_token=1.0) for _ in range(60)]
    snapshot = still([*readers, *(waiting(100, ttft_deadline=9.0) for _ in range(4))])
    one = snapshot.predictor.predict(Shape.decode(1, 4000), 132).mean
    assert (one < tpot) != admits, "a pace that nobody can have is no reason to hold anybody back"
    plan = make_policy("smpart", slo=SLO(9000, 1e3 * tpot)).plan(snapshot)
    pieces = (*(plan.step.pieces if plan.step else ()), *(plan.prefill.pieces if plan.prefill else ()))
    assert bool(pieces) == admits


def test_smpart_takes_no_steps_beside_prefill_that_come_too_late_for_who_joins_during_one() -> None:
    readers = [decoding(1000, outputs=50, tpot=0.0105, itl=0.021, first_token=0.55, last_token=1.0)] * 20
    prompts = [waiting(600, ttft_deadline=1.25) for _ in range(20)]
    dear = Oracle(lambda shape, units, beside: gpu_cost(shape, units, beside) * (9.0 if shape.hybrid else 1.0))
    snapshot = still([*readers, *prompts], predictor=dear)
    plan = make_policy("smpart", slo=SLO(250, 10.5)).plan(snapshot)
    assert plan.prefill is not None and plan.step is not None and not plan.split.exclusive
    head = Shape.prefill([(piece.length, 0) for piece in plan.prefill.pieces])
    step = dear.predict(Shape.decode(20, 20_000), plan.split.decode, head).mean
    assert 2 * step < 1.1 * 0.021, "a prompt ends when a step has just begun, and the next one has its second token"


def test_smpart_plans_where_there_is_neither_time_for_a_burst_nor_a_step_within_the_itl() -> None:
    """Steps take 4 ITLs: a burst of no length is looked at."""
    forward = ForwardView(7, (2,), (200,), Shape.prefill([(200, 0)]), 15, 0, 0.9)
    readers = [decoding(100, tpot=0.02, itl=0.04, first_token=0.9, last_token=0.99) for _ in range(2)]
    kinds = {"units": 2, "step": 1, "layers": 30, "predictor": Oracle(cpu_cost)}
    snapshot = still([*readers, begun(200, 0, forward=7, ttft_deadline=1.01)], forwards=(forward,), **kinds)
    plan = make_policy("smpart", slo=SLO(300, 20)).plan(snapshot)
    assert plan.step is not None or plan.prefill is not None


@pytest.mark.parametrize("policy", ["smpart", "chunked+slack"])
def test_prompts_that_nobody_can_save_get_on_beside_a_reader_all_the_same(policy: str) -> None:
    """With one reader far ahead of its pace and only late prompts, a burst of no length was best for ever."""
    reader = decoding(1000, outputs=200, tpot=0.02, itl=0.04, first_token=0.0, last_token=1.0)
    made = make_policy(policy, slo=SLO(500, 20))
    gets_on = 0
    for turn in range(200):
        now = 1.0 + 0.011 * turn
        rows = [reader | {"last_token": now}, *(waiting(4000, ttft_deadline=0.5) for _ in range(30))]
        plan = made.plan(still(rows, now=now))
        gets_on += plan.prefill is not None or bool(plan.step.pieces)
    assert gets_on >= 20


def test_a_started_forward_gets_on_where_no_reader_ever_has_time_and_no_split_helps() -> None:
    forward = ForwardView(7, (1,), (4000,), Shape.prefill([(4000, 0)]), 20, 0, 0.9)
    made = make_policy("chunked+slack", slo=SLO(100, 8))
    got_on = []
    for turn in range(100):
        now = 1.0 + 0.008 * turn
        reader = decoding(1000, outputs=100 + turn, tpot=0.008, itl=0.009, first_token=0.0, last_token=now)
        late = begun(4000, 0, forward=7, ttft_deadline=0.5)
        plan = made.plan(still([reader, late], now=now, forwards=(forward,)))
        assert plan.prefill is not None or (plan.step is not None and not plan.step.pieces)
        got_on.append(plan.prefill is not None)
    assert any(got_on)
