"""Shares of a device, and what a worker must have read back to have one."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smpart.errors import BackendUnavailable, UsageError
from smpart.partition.cuda.mps_shares import (
    CLIENTS_PER_DEVICE,
    Mode,
    Seen,
    Share,
    check,
    chunk_sms,
    ladder,
    partition_splits,
    plan,
    shares_of,
    sms_at,
)
from smpart.partition.feasible import feasible_splits
from smpart.partition.split import Side, Split

DEVICES = {"a100": 108, "h100-pcie": 114, "h100": 132, "l40s": 142, "b200": 148, "rtx4090": 128, "t4": 40}


def share(units, mode=Mode.PERCENTAGE, whole=132):
    return Share(Side.DECODE, units, whole, mode)


@given(st.integers(1, 100).flatmap(lambda half: st.tuples(st.integers(1, half), st.just(half))))
def test_a_percentage_gives_exactly_the_sms_it_was_computed_for(pairs):
    units, whole = 2 * pairs[0], 2 * pairs[1]
    percentage = share(units, whole=whole).percentage
    assert 1 <= percentage <= 100
    assert sms_at(percentage, whole) == units  # rounded down to pairs of SMs, as documented
    # Up to 200 SMs, one per cent is at most such a pair: the next smaller one is too little.
    assert sms_at(percentage - 1, whole) < units


@given(st.floats(0, 100), st.sampled_from(sorted(DEVICES.values())))
def test_a_percentage_never_gives_more_than_its_part(percentage, whole):
    assert sms_at(percentage, whole) <= whole * percentage / 100


def test_no_limit_is_the_whole_device_even_of_an_odd_number_of_sms():
    assert [sms_at(percentage, 133) for percentage in (100, 99)] == [133, 130]


def test_variables_set_one_limit_and_clear_the_others():
    everything = {
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE",
        "CUDA_MPS_ENABLE_PER_CTX_DEVICE_MULTIPROCESSOR_PARTITIONING",
        "CUDA_MPS_SM_PARTITION",
        "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT",
        "CUDA_MPS_CLIENT_PRIORITY",
    }
    for mode, expected in {
        Mode.PERCENTAGE: {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "28"},
        Mode.AFFINITY: {},
        Mode.PARTITION: {"CUDA_MPS_SM_PARTITION": "GPU-1/Ax"},
    }.items():
        variables = share(36, mode).variables("GPU-1/Ax")
        assert set(variables) == everything
        assert {name: value for name, value in variables.items() if value is not None} == expected


@pytest.mark.parametrize(
    ("mode", "seen", "units", "got"),
    [
        (Mode.PERCENTAGE, Seen(True, 36), 36, 36),
        (Mode.PERCENTAGE, Seen(None, 36), 36, 36),  # a driver that cannot say whether this is a client
        (Mode.PERCENTAGE, Seen(True, 35), 36, 35),
        (Mode.PERCENTAGE, Seen(True, 37), 36, 37),
        (Mode.PERCENTAGE, Seen(True, 132), 132, 132),
        (Mode.PARTITION, Seen(True, 32), 32, 32),
        (Mode.AFFINITY, Seen(True, 132, affinity=36), 36, 36),
        (Mode.AFFINITY, Seen(True, 132, affinity=132), 132, 132),
    ],
)
def test_a_share_is_as_asked_within_the_rounding(mode, seen, units, got):
    assert check(seen, share(units, mode)) == got


@pytest.mark.parametrize(
    ("mode", "seen", "words"),
    [
        (Mode.PERCENTAGE, Seen(False, 132), "outside MPS, where a share is ignored"),
        (Mode.PERCENTAGE, Seen(False, 36), "outside MPS"),
        (Mode.PERCENTAGE, Seen(True, 132), "has them all: MPS ignored its share"),
        (Mode.PARTITION, Seen(True, 132), "has them all: MPS ignored its share"),
        (Mode.AFFINITY, Seen(True, 36, affinity=132), "has them all"),
        (Mode.AFFINITY, Seen(True, 36), "no execution affinity: use mps"),
        (Mode.PERCENTAGE, Seen(True, 38), "asked for 36 of 132 SMs and has 38"),
        (Mode.PERCENTAGE, Seen(True, 34), "and has 34"),
        (Mode.AFFINITY, Seen(True, 132, affinity=40), "and has 40"),
        (Mode.PARTITION, Seen(True, 37), "and has 37"),
        (Mode.PARTITION, Seen(True, 35), "and has 35"),
    ],
)
def test_a_share_that_was_ignored_or_rounded_away_is_refused(mode, seen, words):
    with pytest.raises(BackendUnavailable, match=words):
        check(seen, share(36, mode))


def test_only_partitions_keep_lanes_apart_and_say_what_they_cost():
    assert [mode for mode in Mode if mode.disjoint] == [Mode.PARTITION]
    assert all("both lanes may meet" in mode.guarantee for mode in (Mode.PERCENTAGE, Mode.AFFINITY))
    assert "of its own" in Mode.PARTITION.guarantee and "start anew" in Mode.PARTITION.resize
    assert Mode.PERCENTAGE.resize == Mode.AFFINITY.resize != Mode.PARTITION.resize


@pytest.mark.parametrize(("capability", "chunk"), [((8, 0), 4), ((8, 9), 4), ((9, 0), 8), ((10, 0), 8), ((12, 0), 8)])
def test_partitions_are_made_of_whole_chunks(capability, chunk):
    assert chunk_sms(capability) == chunk
    for sms in DEVICES.values():
        splits = partition_splits(sms, capability)
        assert {split.total for split in splits} == {sms // chunk * chunk}
        assert all(split.units(side) % chunk == 0 for split in splits for side in Side)
        assert len(splits) == sms // chunk + 1


splits_of_a_device = st.sampled_from(sorted(DEVICES.values())).flatmap(
    lambda sms: st.tuples(st.just(sms), st.sets(st.sampled_from(feasible_splits(sms, 8, 8)), min_size=1))
)


@given(splits_of_a_device)
def test_a_pool_has_one_worker_for_every_side_of_every_split_and_none_besides(case):
    sms, splits = case
    pool = plan(splits, sms, Mode.PERCENTAGE)
    assert pool.workers == len(set(pool.shares)) == len(pool.shares) < CLIENTS_PER_DEVICE
    used = set()
    for split in splits:
        for side in Side:
            worker = pool.worker(side, split)
            assert (worker is None) == (split.units(side) == 0)
            if worker is not None:
                assert pool.shares[worker] == Share(side, split.units(side), sms, Mode.PERCENTAGE)
                used.add(worker)
    assert used == set(range(pool.workers))


def test_splits_share_workers_and_memory_is_the_sum_of_theirs():
    pool = plan([Split(8, 4), Split(4, 8), Split(12, 0), Split(8, 4)], 12, Mode.PERCENTAGE)
    assert pool.splits == (Split(4, 8), Split(8, 4), Split(12, 0))
    assert [(each.side.value, each.units) for each in pool.shares] == [
        ("prefill", 4),
        ("prefill", 8),
        ("prefill", 12),
        ("decode", 4),
        ("decode", 8),
    ]
    assert pool.memory_bytes({each: 10 * each.units for each in pool.shares}) == 360
    with pytest.raises(UsageError, match="split 6/6 has no workers; there are 4/8, 8/4, 12/0"):
        pool.worker(Side.DECODE, Split(6, 6))


def test_a_pool_must_fit_a_device():
    with pytest.raises(UsageError, match="at least one split"):
        plan([], 132, Mode.PERCENTAGE)
    with pytest.raises(
        UsageError, match=r"65 splits need 129 MPS workers, and a device takes 48 clients \(1 reserved\)"
    ):
        plan(
            feasible_splits(132, 2, 2)[:65],
            132,
            Mode.AFFINITY,
        )
    exactly = feasible_splits(48, 2, 2)[:24]  # one exclusive split and 23 shared ones: 47 workers
    assert plan(exactly, 48, Mode.PERCENTAGE).workers == 47
    with pytest.raises(UsageError, match="2 reserved"):
        plan(exactly, 48, Mode.PERCENTAGE, reserved=2)


def test_static_partitions_serve_one_split_at_a_time():
    assert plan([Split(96, 32)], 132, Mode.PARTITION).workers == 2
    with pytest.raises(UsageError, match="2 splits at once cannot be had with static partitions"):
        plan([Split(96, 32), Split(64, 64)], 132, Mode.PARTITION)


@given(st.sampled_from(sorted(DEVICES.values())), st.integers(4, 200))
def test_a_ladder_fits_its_workers_and_keeps_the_ends(sms, workers):
    known = feasible_splits(sms, 2, 2)
    chosen = ladder(known, workers)
    assert set(chosen) <= set(known) and len(set(chosen)) == len(chosen) and list(chosen) == sorted(chosen)
    assert chosen[0] == known[0] and chosen[-1] == known[-1]
    assert len(shares_of(chosen, sms, Mode.PERCENTAGE)) <= workers
    gaps = [b.prefill - a.prefill for a, b in pairwise(chosen)]
    assert max(gaps) - min(gaps) <= 4  # two steps, from rounding both ends
    assert len(chosen) == min(len(known), 2 + (workers - 2) // 2)


def test_a_ladder_is_the_same_from_both_ends():
    for workers in (4, 6, 10, 16):  # the middle of 65 shared splits, and thirds, fifths and eighths of 66 steps
        sides = [(split.prefill, split.decode) for split in ladder(feasible_splits(132, 2, 2), workers)]
        assert all(abs(p - d) <= 2 for (p, _), (_, d) in zip(sides, reversed(sides), strict=True))


def test_a_ladder_needs_a_shared_split():
    with pytest.raises(UsageError, match="3 workers: two serve the exclusive splits"):
        ladder(feasible_splits(132, 2, 2), 3)
