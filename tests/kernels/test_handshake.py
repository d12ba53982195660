"""The meeting of two lanes: met exactly when both are wholly resident on different SMs, and over in time always."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

PREFILL, DECODE = 0, 1
BLOCK_SHARED = 227 * 1024
MISSED = 1 << 32
TIMEOUT, HOLD = 20_000, 5_000
EIGHT = frozenset(range(8))


@dataclass
class Meeting:
    """What the host reads after both launches."""

    word: int
    wanted: tuple[int, int]
    sm: list[np.ndarray[Any, Any]]
    gap: list[np.ndarray[Any, Any]]
    took: int

    @property
    def met(self) -> bool:
        assert (self.counted == self.wanted) != bool(self.word & MISSED)
        return self.word == self.wanted[PREFILL] | self.wanted[DECODE] << 16

    @property
    def counted(self) -> tuple[int, int]:
        return self.word & 0xFFFF, self.word >> 16 & 0xFFFF

    @property
    def longest_gap(self) -> int:
        return max(int(gap.max()) for gap in self.gap if len(gap))


def meet(
    gpu: Any,
    lanes: tuple[frozenset[int], frozenset[int]],
    wanted: tuple[int, int],
    *,
    timeout: int = TIMEOUT,
    hold: int = HOLD,
    shared: int = BLOCK_SHARED,
    come: tuple[bool, bool] = (True, True),
) -> Meeting:
    """Queue a meeting's launches on a device that was set up before, and run it."""
    word = np.zeros(1, np.uint64)
    sm = [np.full(count, -7, np.int32) for count in wanted]
    gap = [np.zeros(count, np.uint64) for count in wanted]
    for side in (PREFILL, DECODE):
        if wanted[side] and come[side]:
            numbers = [np.int32(side), np.int32(wanted[PREFILL]), np.int32(wanted[DECODE])]
            args = [word, *numbers, np.uint64(timeout), np.uint64(hold), sm[side], gap[side]]
            gpu.queue("meet", wanted[side], 32, args, lanes[side], stream=side, shared=shared)
    took = gpu.run()
    return Meeting(int(word[0]), wanted, sm, gap, took)


def proof(gpu: Any, lanes: tuple[frozenset[int], frozenset[int]], sizes: tuple[int, int]) -> bool:
    """The three meetings that handshake.cu asks for."""
    prefill, decode = sizes
    gpu.device(8)
    together = meet(gpu, lanes, sizes)
    gpu.device(8)
    more_prefill = meet(gpu, lanes, (prefill + 1, 0))
    gpu.device(8)
    more_decode = meet(gpu, lanes, (0, decode + 1))
    return (
        together.met
        and (more_prefill.met, more_prefill.counted) == (False, (prefill, 0))
        and (more_decode.met, more_decode.counted) == (False, (0, decode))
    )


def test_disjoint_lanes_meet(host_gpu: Any) -> None:
    host_gpu.device(8)
    prefill, decode = frozenset({0, 1, 2, 5, 6}), frozenset({3, 4, 7})
    meeting = meet(host_gpu, (prefill, decode), (5, 3))
    assert meeting.met
    assert meeting.counted == (5, 3)
    assert set(meeting.sm[PREFILL].tolist()) == prefill
    assert set(meeting.sm[DECODE].tolist()) == decode
    assert HOLD <= meeting.took < TIMEOUT
    assert meeting.longest_gap * 10 < HOLD


def test_a_lane_that_is_smaller_than_promised_is_short_by_that_much(host_gpu: Any) -> None:
    host_gpu.device(8)
    meeting = meet(host_gpu, (frozenset({0, 1, 2, 3}), frozenset({5, 6})), (4, 3))
    assert not meeting.met
    assert meeting.counted == (4, 2)
    assert sorted(meeting.sm[DECODE].tolist()) == [-1, 5, 6]  # the third came when the meeting was over


def test_lanes_with_an_sm_in_common_do_not_meet(host_gpu: Any) -> None:
    host_gpu.device(8)
    meeting = meet(host_gpu, (frozenset({0, 1, 2, 3}), frozenset({3, 4, 5})), (4, 3))
    assert not meeting.met
    assert sum(meeting.counted) == 6


@pytest.mark.parametrize("absent", [PREFILL, DECODE])
def test_times_out_when_the_other_lane_never_comes(host_gpu: Any, absent: int) -> None:
    host_gpu.device(8)
    come = (absent != PREFILL, absent != DECODE)
    meeting = meet(host_gpu, (frozenset({0, 1, 2}), frozenset({4, 5, 6})), (3, 3), come=come)
    assert not meeting.met
    assert meeting.counted == (3 * come[0], 3 * come[1])
    assert TIMEOUT <= meeting.took < 2 * TIMEOUT


def test_a_lane_that_comes_too_late_is_not_counted(host_gpu: Any) -> None:
    host_gpu.device(8)
    late = 3 * TIMEOUT
    held, span = np.zeros(3, np.int32), np.zeros((3, 2), np.uint64)
    host_gpu.queue("probe", 3, 1, [held, span, np.uint64(late)], {4, 5, 6}, stream=DECODE, shared=BLOCK_SHARED)
    meeting = meet(host_gpu, (frozenset({0, 1, 2}), frozenset({4, 5, 6})), (3, 3))
    assert not meeting.met
    assert meeting.counted == (3, 0)
    assert meeting.sm[DECODE].tolist() == [-1, -1, -1]
    assert meeting.took < late + TIMEOUT


def test_ends_although_the_timer_stands_still(host_gpu: Any) -> None:
    host_gpu.device(8, tick=0)
    lanes = (frozenset({0, 1, 2}), frozenset({4}))
    assert meet(host_gpu, lanes, (3, 2)).counted == (3, 1)
    host_gpu.device(8, tick=0)
    assert meet(host_gpu, lanes, (3, 1)).met


def test_unconfined_streams_meet_but_fail_the_proof(host_gpu: Any) -> None:
    host_gpu.device(8)
    assert meet(host_gpu, (EIGHT, EIGHT), (5, 3)).met
    assert not proof(host_gpu, (EIGHT, EIGHT), (5, 3))


def test_blocks_that_share_an_sm_are_found_out(host_gpu: Any) -> None:
    host_gpu.device(8)
    crowd = meet(host_gpu, (frozenset({0, 1}), frozenset()), (3, 0), shared=BLOCK_SHARED // 3)
    assert crowd.met  # the second meeting of the proof, which must be missed


@pytest.mark.parametrize("turn", [20_000, 20_100, 20_200, 20_300, 200_000])  # whatever a block does at its end
def test_turns_on_one_device_show_as_gaps(host_gpu: Any, turn: int) -> None:
    hold = 100_000
    host_gpu.device(8, time_slice=turn)
    meeting = meet(host_gpu, (EIGHT, EIGHT), (8, 8), timeout=1_000_000, hold=hold)
    assert meeting.met  # each side counted the other, switched out with its context
    assert meeting.longest_gap * 10 > hold


subsets = st.sets(st.integers(0, 7), min_size=1).map(frozenset)


@hypothesis_settings(max_examples=60)
@given(prefill=subsets, decode=subsets, off=st.tuples(st.integers(-1, 1), st.integers(-1, 1)))
def test_proof_holds_exactly_for_disjoint_lanes_of_the_promised_sizes(
    host_gpu: Any, prefill: frozenset[int], decode: frozenset[int], off: tuple[int, int]
) -> None:
    sizes = max(1, len(prefill) + off[0]), max(1, len(decode) + off[1])
    true = not prefill & decode and sizes == (len(prefill), len(decode))
    assert proof(host_gpu, (prefill, decode), sizes) == true
