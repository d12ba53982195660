"""Rules of the policies that do not split: two streams on one device (overlap, semi-PD's caps), and two devices."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from smpart.errors import UsageError
from smpart.partition import Split
from smpart.partition.feasible import feasible_splits, overlapping_splits
from smpart.scheduler import SLO, Snapshot, make_policy
from smpart.scheduler.plan import AcrossDevices, StartPrefill
from smpart.scheduler.policies.semipd import Caps
from smpart.scheduler.table import State
from tests.scheduler.double import Ask, Double, gpu_cost
from tests.scheduler.still import decoding, still, waiting

H100 = feasible_splits(132, minimum=8, step=8)


def shared(rows: list[dict], **rest) -> Snapshot:
    return replace(still(rows, **rest), overlapping=overlapping_splits(H100))


def apart(rows: list[dict], decode_blocks: int = 10_000, **rest) -> Snapshot:
    return replace(still(rows, **rest), splits=(Split(132, 132),), decode_blocks=decode_blocks)


def crossing(known: int, **rest) -> dict:
    return decoding(known, state=State.CROSSING) | rest


# ---- overlap


@pytest.mark.parametrize("rows", [[decoding(100)], [waiting(3000)], [decoding(100), waiting(3000), waiting(90)]])
def test_overlap_gives_everything_to_both_whoever_has_work(rows) -> None:
    plan = make_policy("overlap").plan(shared(rows))
    assert plan.split == Split(132, 132)
    assert (plan.step is not None) == any(row["state"] == State.RUNNING for row in rows)
    assert (plan.prefill is not None) == any(row["state"] == State.WAITING for row in rows)
    assert plan.prefill is None or plan.prefill.layers is None, "nobody chooses where a prefill is cut"


def test_overlap_never_moves_a_line() -> None:
    asks = [Ask(0.1 * i, 900, 5, slo=SLO(500, 60)) for i in range(20)]
    double = Double(make_policy("overlap"), asks, cost=gpu_cost, units=132, step=12, layers=32, shares=True)
    assert all(len(told.times) == 5 for told in double.run()) and double.moves == 1


def test_overlap_is_refused_where_lanes_cannot_share() -> None:
    with pytest.raises(UsageError, match="cannot share their units"):
        make_policy("overlap", splits=H100)
    with pytest.raises(UsageError, match="cannot share their units"):
        make_policy("overlap").plan(still([waiting(10)]))
    with pytest.raises(UsageError, match="no argument"):
        make_policy("overlap:1")
    make_policy("overlap", splits=H100, overlapping=overlapping_splits(H100))


# ---- semi-PD


def test_semipd_has_caps_of_the_whole_where_lanes_can_share() -> None:
    """(100, 100) from the start, alone or not; a cap of 80 percent of 132 SMs is 104 or 108 of them."""
    policy = make_policy("semipd")
    for rows in ([decoding(100)], [waiting(500)], [decoding(100), waiting(500)]):
        assert policy.plan(shared(rows)).split == Split(132, 132)
    lower = make_policy("semipd")
    lower.caps = Caps(80, 100)
    assert lower.plan(shared([decoding(100), waiting(500)])).split == Split(104, 132)
    lower = make_policy("semipd")
    lower.caps = Caps(100, 80)
    assert lower.plan(shared([decoding(100)])).split == Split(132, 108)


def test_semipd_says_where_its_caps_become_shares(caplog) -> None:
    with caplog.at_level(logging.WARNING):
        policy = make_policy("semipd", splits=H100)
    assert "cannot share" in caplog.text
    assert policy.plan(still([decoding(100), waiting(500)])).split == Split(60, 72)
    caplog.clear()
    make_policy("semipd", splits=H100, overlapping=overlapping_splits(H100))
    assert not caplog.text


# ---- disagg


def pieces(plan) -> list[int]:
    assert isinstance(plan.prefill, StartPrefill)
    return [piece.length for piece in plan.prefill.pieces]


def test_disagg_batches_up_to_the_saturating_length_and_longer_prompts_go_alone() -> None:
    assert pieces(make_policy("disagg").plan(apart([waiting(n) for n in (200, 200, 112, 9)]))) == [200, 200, 112]
    assert pieces(make_policy("disagg").plan(apart([waiting(n) for n in (513, 9)]))) == [513]
    assert pieces(make_policy("disagg").plan(apart([waiting(n) for n in (9, 513)]))) == [9]


def test_disagg_keeps_both_devices_busy_under_its_only_split() -> None:
    plan = make_policy("disagg").plan(apart([decoding(100), waiting(300)]))
    assert plan.split == Split(132, 132) and plan.step.rows == (0,) and pieces(plan) == [300]


def test_disagg_pulls_while_512_tokens_stay_free_for_each_request() -> None:
    """33 blocks for each of two that would be there, and 10 for the row itself: SGLang's reserve."""
    rows = [decoding(161, blocks=11), crossing(161), crossing(161)]
    needed = 10 + 2 * 512 // 16
    assert make_policy("disagg").plan(apart(rows, needed)).pull == (1,)
    assert make_policy("disagg").plan(apart(rows, needed - 1)).pull == ()
    assert make_policy("disagg").plan(apart(rows, 10 + needed + 512 // 16)).pull == (1, 2)


def test_disagg_pulls_the_first_whatever_is_set_aside_if_decode_is_empty() -> None:
    rows = [crossing(161), crossing(161)]
    assert make_policy("disagg").plan(apart(rows, 10)).pull == (0,)
    assert make_policy("disagg").plan(apart(rows, 9)).pull == ()
    under_way = [crossing(161, flying=1), crossing(161)]
    assert make_policy("disagg").plan(apart(under_way, 20)).pull == ()


def test_disagg_looks_at_each_device_s_own_blocks() -> None:
    full_here = make_policy("disagg").plan(apart([decoding(161, blocks=10), waiting(500)], free_blocks=0))
    assert full_here.step.rows == (0,) and full_here.prefill is None and not full_here.preempt
    full_there = make_policy("disagg").plan(apart([decoding(161, blocks=10)] * 2 + [waiting(500)], 0))
    assert full_there.preempt == (1,) and pieces(full_there) == [500]


def test_disagg_reads_its_link() -> None:
    policy = make_policy("disagg:25")
    assert isinstance(policy, AcrossDevices) and policy.link_gbps == 25.0 and policy.name == "disagg:25"
    assert make_policy("disagg").link_gbps is None and not isinstance(make_policy("overlap"), AcrossDevices)
    for text in ("0", "-1", "fast", "inf", "nan"):
        with pytest.raises(UsageError, match="gigabits"):
            make_policy(f"disagg:{text}")
    with pytest.raises(UsageError, match="needs two"):
        make_policy("disagg").plan(still([waiting(10)]))


def test_disagg_loses_nobody_over_a_slow_link() -> None:
    asks = [Ask(0.3 * i, 120, 6, slo=SLO(3000, 400)) for i in range(10)]
    slow = Double(make_policy("disagg"), asks, token_seconds=0.01).run()
    fast = Double(make_policy("disagg"), asks, token_seconds=1e-6).run()
    assert all(len(told.times) == 6 for told in slow)
    late = [s.times[1] - s.times[0] for s in slow]
    assert min(late) >= 1.2 > max(f.times[1] - f.times[0] for f in fast)
