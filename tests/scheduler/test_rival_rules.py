"""Rules of the published split policies, pinned to worked examples from their papers and code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from smpart.errors import UsageError
from smpart.partition import Shape, Split
from smpart.partition.feasible import feasible_splits
from smpart.predictor.estimate import NOTHING, Estimate, Sides, split_by_split
from smpart.scheduler import SLO, Snapshot, make_policy
from smpart.scheduler.plan import Plan, ResumePrefill, StartPrefill
from smpart.scheduler.policies.muxwise import ladder
from smpart.scheduler.policies.pdmux import table
from smpart.scheduler.policies.semipd import Caps, Measured, adjust
from smpart.scheduler.snapshot import ForwardView
from tests.scheduler.double import Ask, Double
from tests.scheduler.still import decoding, still, waiting

H100, A100 = {"units": 132, "step": 8}, {"splits": feasible_splits(108, minimum=4, step=2), "split": Split(0, 108)}


class Phases:
    """A predictor of a formula for each phase; `guard` is how much worse a step can come beside a neighbour."""

    drifted = None

    def __init__(
        self, prefill: Callable[[Shape, int], float], decode: Callable[[Shape, int], float], guard: float = 1.0
    ) -> None:
        self._prefill, self._decode, self._guard = prefill, decode, guard

    def predict(self, shape: Shape, units: int, neighbour: Shape = NOTHING) -> Estimate:
        seconds = self._prefill(shape, units) if shape.prefill_tokens else 0.0
        seconds += self._decode(shape, units) if shape.decode_batch else 0.0
        return Estimate(seconds, seconds * (self._guard if neighbour.tokens else 1.0))

    def predict_splits(self, step: Shape, head: Shape, splits: Sequence[Split]) -> Sides:
        return split_by_split(self, step, head, splits)

    def observe(self, shape: Shape, units: int, neighbour: Shape, fraction: float, seconds: float) -> None:
        pass


def forward(rows: tuple[int, ...], tokens: int, left: int, **rest) -> ForwardView:
    return ForwardView(**({"id": 7, "rows": rows, "lengths": (tokens,), "shape": Shape.prefill([(tokens, 0)]),
                           "layers_left": left, "inflight": 0, "started": 0.5} | rest))  # fmt: skip


def names(splits: tuple[Split, ...]) -> list[str]:
    return [str(split) for split in splits]


# ---- pdmux


def test_pdmux_builds_the_rows_that_sglang_does() -> None:
    h100, h20 = feasible_splits(132, minimum=8, step=8), feasible_splits(78, minimum=8, step=8)
    assert names(table(A100["splits"])) == ["84/24", "78/30", "72/36", "66/42", "60/48", "54/54"]
    assert names(table(h100)) == ["112/20", "104/28", "96/36", "88/44", "80/52", "72/60"]
    assert len(table(h20)) == 3


def test_pdmux_has_rows_on_any_device_that_can_be_split() -> None:
    assert names(table(feasible_splits(2))) == ["1/1"]
    assert names(table(feasible_splits(8))) == ["7/1", "6/2", "5/3", "4/4"]
    with pytest.raises(UsageError, match="cannot be split"):
        make_policy("pdmux", splits=(Split(0, 1), Split(1, 0)))


@pytest.mark.parametrize(("batch", "split"), [(1, "112/20"), (11, "112/20"), (12, "104/28"), (18, "96/36"),
                                              (36, "72/60"), (99, "72/60")])  # fmt: skip
def test_pdmux_chooses_the_row_by_the_decode_batch(batch: int, split: str) -> None:
    plan = make_policy("pdmux").plan(still([decoding(100)] * batch + [waiting(500)], **H100))
    assert str(plan.split) == split


def test_pdmux_on_the_three_rows_of_78_units() -> None:
    splits = feasible_splits(78, minimum=8, step=8)
    plan = make_policy("pdmux").plan(still([decoding(100)] * 24 + [waiting(500)], splits=splits, split=Split(0, 78)))
    assert plan.split == table(splits)[1]


@pytest.mark.parametrize(("batch", "split"), [(1, "112/20"), (4, "112/20"), (5, "104/28"), (10, "96/36"), (19, "80/52"),
                                              (20, "64/68"), (25, "56/76"), (200, "56/76")])  # fmt: skip
def test_pdmux_takes_a_table(batch: int, split: str) -> None:
    policy = make_policy("pdmux:112/20@1+104/28@5+96/36@10+80/52@15+64/68@20+56/76@25")
    assert str(policy.plan(still([decoding(100)] * batch + [waiting(500)], **H100)).split) == split


def test_pdmux_maps_a_table_of_another_device_by_shares() -> None:
    splits = feasible_splits(4)
    rows = [decoding(100)] * 5 + [waiting(500)]
    policy = make_policy("pdmux:112/20@1+66/66@5")
    assert policy.plan(still(rows, splits=splits, split=splits[0])).split == Split(2, 2)
    assert policy.plan(still(rows[1:], splits=splits, split=splits[0])).split == Split(3, 1)


@pytest.mark.parametrize("bad", ["112/20", "112/20@", "132/0@1", "112/20@5+104/28@1", "112/20@1+104/28@1", "a@1"])
def test_pdmux_refuses_a_table_it_cannot_read(bad: str) -> None:
    with pytest.raises(UsageError):
        make_policy(f"pdmux:{bad}")


def test_pdmux_keeps_its_row_until_the_batch_is_merged() -> None:
    policy = make_policy("pdmux")
    start = policy.plan(still([decoding(100)] * 36 + [waiting(8192), waiting(9000)], **H100))
    assert str(start.split) == "72/60"
    assert start.prefill.layers == 8
    assert [piece.length for piece in start.prefill.pieces] == [8192], "9,000 more would be over 16,384"
    rows = [decoding(100, seq=n) for n in range(1, 4)] + [decoding(9, seq=37), waiting(9000, seq=38)]
    on = policy.plan(still(rows, forwards=(forward((3,), 8192, 24),), **H100))
    assert str(on.split) == "72/60", "a shrinking decode batch changes nothing"
    assert on.prefill == ResumePrefill(7, 8)
    last = policy.plan(still(rows, forwards=(forward((3,), 8192, 0, inflight=1),), **H100))
    assert last.prefill is None, "one batch at a time"
    assert str(policy.plan(still(rows, **H100)).split) == "112/20"


def test_pdmux_gives_2048_tokens_32_layers() -> None:
    plan = make_policy("pdmux").plan(still([decoding(100), waiting(2048)], layers=80, **H100))
    assert plan.prefill.layers == 32


# ---- MuxWise


def mux_prefill(shape: Shape, units: int) -> float:
    """A100, 8B: the published coefficients for 80 SMs; what they give for 64."""
    n = shape.prefill_tokens / 1024
    return (91.84 if units == 64 else 0.1074 * n * n + 16.9732 * n + 12.3569) / 1e3


def mux_decode(shape: Shape, units: int) -> float:
    """Its decode: the published coefficients for 28 SMs; what they give for the others."""
    other = {12: 27.83 / 1.2, 44: 10.29 / 1.2}
    return other.get(units, 0.04039 * shape.decode_context / 1024 + 0.02668 * shape.decode_batch + 7.4748) / 1e3


@pytest.mark.parametrize(("tpot", "split", "layers"), [(20, "80/28", 6), (12, "64/44", 4)])
def test_muxwise_takes_the_smallest_decode_side_and_as_many_layers_as_last_a_step(tpot, split, layers) -> None:
    rows = [decoding(2048) for _ in range(32)] + [waiting(4096)]
    snapshot = still(rows, predictor=Phases(mux_prefill, mux_decode, guard=1.2), **A100)
    plan = make_policy("muxwise", slo=SLO(1000, tpot)).plan(snapshot)
    assert str(plan.split) == split
    assert plan.step.rows
    assert plan.prefill.layers == layers


def test_muxwise_partitions_step_by_16_sms() -> None:
    assert [split.decode for split in ladder(A100["splits"])] == [12, 28, 44, 60, 76, 92]
    h100 = ladder(feasible_splits(132, minimum=8, step=8))
    assert [split.decode for split in h100] == [20, 36, 52, 68, 84, 100, 116]
    assert names(ladder(feasible_splits(3))) == ["2/1", "1/2"]


def test_muxwise_without_a_partition_that_holds_gives_decode_the_largest_and_goes_on() -> None:
    snapshot = still([decoding(100), waiting(500)], predictor=Phases(lambda *_: 1.0, lambda *_: 1.0), **H100)
    plan = make_policy("muxwise").plan(snapshot)
    assert str(plan.split) == "16/116"
    assert plan.prefill is not None


def test_muxwise_preempts_for_a_batch_that_would_be_late_if_the_victim_can_still_be_in_time() -> None:
    predictor = Phases(lambda shape, _: shape.prefill_tokens / 1e4, lambda *_: 0.01)

    def plan(victim_due: float, forwards: int = 1) -> StartPrefill | ResumePrefill | None:
        rows = [waiting(600, ttft_deadline=1.2), *[waiting(20_000, ttft_deadline=victim_due)] * 2]
        views = tuple(forward((row,), 20_000, 16, id=row) for row in range(1, 1 + forwards))
        snapshot = still(rows, forwards=views, predictor=predictor, **H100)
        table = snapshot.table
        table.state[1:3], table.slot[1:3] = 2, 1
        return make_policy("muxwise").plan(replace(snapshot, waiting=snapshot.waiting[:1])).prefill

    assert isinstance(plan(9.0), StartPrefill)
    assert isinstance(plan(2.0), ResumePrefill)
    assert plan(9.0, forwards=2).forward == 2, "nobody preempts a batch that preempts"


# ---- chunked+slack: ours, on hybrid steps


@pytest.mark.parametrize("queue", [1, 5, 30])
@pytest.mark.parametrize("readers", [0, 1, 20])
def test_chunked_slack_never_splits_and_gets_on_with_prompts_that_are_in_time(queue: int, readers: int) -> None:
    rows = [decoding(1000, outputs=90, first_token=0.0, last_token=1.0) for _ in range(readers)]
    plan = make_policy("chunked+slack").plan(still([*rows, *(waiting(500, ttft_deadline=1.4) for _ in range(queue))]))
    assert plan.split.exclusive
    assert plan.prefill is not None or plan.step.pieces


# ---- Nexus


def hundred(**rest) -> dict:
    return {"units": 100, "step": 1, "split": Split(0, 100)} | rest


NEXUS = {
    "smooth": Phases(lambda _, r: 10_000 / r, lambda _, r: 6 + 400 / r),
    "flat": Phases(lambda _, r: 100 * max(1, 80 / r), lambda _, r: 10 * max(1, 40 / r)),
}


@pytest.mark.parametrize(
    ("curves", "free", "split"),
    [("smooth", 10_000, "20/80"), ("smooth", 1, "77/23"), ("flat", 10_000, "63/37"), ("flat", 1, "62/38")],
)
def test_nexus_gives_its_target_all_that_the_other_phase_can_spare(curves: str, free: int, split: str) -> None:
    rows = [decoding(100), decoding(200), waiting(10)]
    plan = make_policy("nexus").plan(still(rows, predictor=NEXUS[curves], free_blocks=free, **hundred()))
    assert str(plan.split) == split
    assert plan.prefill.layers is None


@pytest.mark.parametrize(("decode_saturates", "split"), [(49, "50/50"), (48, "56/44")])
def test_nexus_moves_only_by_more_than_five_points(decode_saturates: int, split: str) -> None:
    curves = Phases(lambda _, r: 100 * max(1, 80 / r), lambda _, r: 10 * max(1, decode_saturates / r))
    plan = make_policy("nexus").plan(still([decoding(100), waiting(10)], predictor=curves, **hundred()))
    assert str(plan.split) == split


@pytest.mark.parametrize(("policy", "lengths"), [("nexus:15", [200, 400]), ("nexus", [400, 200])])
def test_nexus_takes_the_shortest_first_less_what_age_takes_off(policy: str, lengths: list[int]) -> None:
    """The unit of the ageing constant is not printed: 15 tokens a second, or, by default, a millisecond."""
    rows = [waiting(8000, arrival=0.0), waiting(400, arrival=0.1), waiting(200, arrival=0.2)]
    plan = make_policy(policy).plan(still(rows, now=0.3))
    assert [piece.length for piece in plan.prefill.pieces] == lengths, "8,000 is over the limit and ends the batch"


def test_nexus_cuts_a_prompt_over_the_limit_when_it_comes_first() -> None:
    plan = make_policy("nexus").plan(still([waiting(8000), waiting(10)], now=9.0))
    assert [piece.length for piece in plan.prefill.pieces] == [10]
    plan = make_policy("nexus").plan(still([waiting(8000), waiting(10, arrival=8.9)], now=9.0))
    assert [piece.length for piece in plan.prefill.pieces] == [2048]


# ---- Bullet


def roofline(shape: Shape, units: int) -> float:
    """The paper's kernel: 312 TFLOP/s and 2 TB/s on 108 units, of which 30 saturate the bandwidth."""
    flop, moved = (2e12, 1e9) if shape.prefill_tokens else (1.6e10, 1.6e10)
    return flop / min(flop / moved * 2e12 * min(1.0, units / 30), 312e12 * units / 108)


def bullet_rows(first_token: float, ttft_ms: float, queue: int = 1) -> Snapshot:
    rows = [decoding(100, outputs=10, first_token=first_token, last_token=0.99)] * 4
    return still([*rows, *[waiting(1000, arrival=1.0 - ttft_ms / 1e3)] * queue], predictor=Phases(roofline, roofline),
                 splits=feasible_splits(108, minimum=2, step=2), split=Split(0, 108))  # fmt: skip


def test_bullets_kernel_is_the_papers() -> None:
    assert roofline(Shape.prefill([(1, 0)]), 54) == pytest.approx(12.82e-3, rel=1e-3)
    assert [roofline(Shape.decode(1, 1), units) for units in (54, 20, 16)] == pytest.approx([8e-3, 12e-3, 15e-3])


def test_bullet_shrinks_decode_to_what_holds_its_objective() -> None:
    plan = make_policy("bullet", slo=SLO(1000, 15.001)).plan(bullet_rows(0.9, 0.0))
    assert str(plan.split) == "92/16"
    assert plan.prefill.layers == 4


def test_bullet_shrinks_prefill_when_readers_are_late_and_balances_when_both_are() -> None:
    slo = SLO(1000, 15.001)
    late = make_policy("bullet", slo=slo).plan(bullet_rows(0.5, 0.0))
    assert str(late.split) == "54/54", "decode has no fewer units than before"
    both = make_policy("bullet", slo=slo).plan(bullet_rows(0.5, 1000.0))
    assert str(both.split) == "92/16", "TTFT is at its objective and more; fewer units and TPOT would be further off"
    assert both.step is not None


def test_bullet_suspends_decode_while_ttfts_fail_and_every_reader_has_time() -> None:
    slo = SLO(1000, 15.001)
    plan = make_policy("bullet", slo=slo).plan(bullet_rows(0.9, 1500.0))
    assert plan.split == Split(108, 0)
    assert plan.step is None


def test_bullet_takes_the_least_work_first_unless_that_makes_somebody_late() -> None:
    predictor = Phases(lambda shape, _: shape.prefill_tokens / 1e4, lambda *_: 0.01)

    def lengths(*arrivals: float) -> list[int]:
        rows = [waiting(n, arrival=at) for n, at in zip((1000, 500), arrivals, strict=True)]
        plan = make_policy("bullet", slo=SLO(200, 50)).plan(still(rows, predictor=predictor))
        return [piece.length for piece in plan.prefill.pieces]

    assert lengths(1.0, 1.0) == [500, 1000]
    assert lengths(0.92, 1.0) == [1000, 500]


# ---- semi-PD

SEMI = SLO(500, 100)


def seen(ttft_ms: float, tpot_ms: float) -> Measured:
    return Measured(ttft_ms / 1e3, 0.0, ttft_ms / 1e3, tpot_ms / 1e3)


@pytest.mark.parametrize(
    ("caps", "ttft", "tpot", "then"),
    [
        ((100, 80), 300, 98, (100, 82)),  # 107.8 fails, 96.45 is predicted at 82
        ((100, 80), 300, 115, (100, 86)),  # three steps, 109.8 is predicted
        ((100, 80), 300, 90, (100, 80)),
        ((90, 80), 600, 120, (100, 100)),
        ((100, 80), 600, 120, (100, 80)),
        ((100, 100), 300, 98, (94, 100)),  # decode is at 100: prefill gives way, as long as its TTFT holds
        ((100, 100), 499, 98, (100, 100)),
        ((82, 100), 300, 120, (80, 100)),  # the floor
        ((80, 100), 505, 20, (82, 100)),
    ],
)
def test_semipd_adjusts_caps_as_its_code_does(caps, ttft, tpot, then) -> None:
    assert adjust(Caps(*caps), seen(ttft, tpot), SEMI) == Caps(*then)


def test_semipd_decides_after_400_finished_requests_and_switches_later() -> None:
    """At 95 ms a step the margin on TPOT is too small; prefill gives way. The double asks for each plan twice."""
    asks = [Ask(0.1 * i, 4, 2, slo=SEMI) for i in range(420)]
    policy = make_policy("semipd:20", slo=SEMI)
    told = Double(policy, asks, cost=lambda shape, *_: 0.095 if shape.decode_batch else 0.05).run()
    assert len(told) == 420
    assert policy.caps == Caps(94, 100)


# ---- DuetServe


def duet(decode: int, tokens: int, tpot: float) -> Plan:
    curves = Phases(lambda _, units: 0.1 * 132 / units, lambda _, units: 0.02 * max(1, 40 / units))
    rows = [decoding(100)] * decode + [waiting(tokens)]
    return make_policy("duet", slo=SLO(1000, tpot)).plan(still(rows, step=2, predictor=curves))


def test_duet_splits_for_most_tokens_a_second_when_a_hybrid_step_takes_too_long() -> None:
    plan = duet(64, 8128, 50.001)
    assert str(plan.split) == "116/16"
    assert plan.reason.startswith("116/16: 2 steps of 64 rows beside 8128 tokens")
    assert isinstance(plan.prefill, StartPrefill)
    assert plan.prefill.layers is None


def test_duet_stays_on_one_lane_while_a_hybrid_step_is_short_enough() -> None:
    plan = duet(64, 8128, 121)
    assert plan.split == Split(0, 132)
    assert plan.step.pieces


def test_duet_ends_an_iteration_when_its_steps_and_its_prefill_have() -> None:
    """The split's 2 steps of 50 ms beside 113.8 ms of prefill: no third one before that ends."""
    curves = Phases(lambda _, units: 0.1 * 132 / units, lambda _, units: 0.02 * max(1, 40 / units))
    slo = SLO(1000, 50.001)
    asks = [Ask(0.0, 10, 12, slo=slo)] * 64 + [Ask(0.15, 8128, 1, slo=slo)]
    double = Double(
        make_policy("duet", slo=slo), asks, cost=lambda shape, units, _: curves.predict(shape, units).mean,
        predictor=curves, units=132, step=2, layers=32,
    )  # fmt: skip
    *readers, question = double.run()
    inside = [time for time in readers[0].times if time <= question.times[0] + 1e-9]
    start = question.times[0] - 0.1 * 132 / 116
    assert [time - start for time in inside[-2:]] == pytest.approx([0.05, 0.1], abs=1e-3)
