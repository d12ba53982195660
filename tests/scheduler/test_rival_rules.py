"""Rules of the published split policies, pinned to worked examples from their papers and code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from smpart.errors import UsageError
from smpart.partition import Shape, Split
from smpart.partition.feasible import feasible_splits
from smpart.predictor.estimate import NOTHING, Estimate
from smpart.scheduler import SLO, make_policy
from smpart.scheduler.plan import ResumePrefill, StartPrefill
from smpart.scheduler.policies.muxwise import ladder
from smpart.scheduler.policies.pdmux import table
from smpart.scheduler.snapshot import ForwardView
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
