"""The probe: which SMs a stream really uses, and when each block had its own."""

from typing import Any

import numpy as np
import pytest

BLOCK_SHARED = 227 * 1024


@pytest.mark.parametrize("lane", [{3}, {0, 2, 5}, set(range(8))])
def test_finds_every_sm_of_the_lane_and_no_other(host_gpu: Any, lane: set[int]) -> None:
    host_gpu.device(8)
    blocks, hold = 4 * len(lane), 3_000
    sm, span = np.full(blocks, -1, np.int32), np.zeros((blocks, 2), np.uint64)
    host_gpu.queue("probe", blocks, 32, [sm, span, np.uint64(hold)], lane, shared=BLOCK_SHARED)
    took = host_gpu.run()
    assert set(sm.tolist()) == lane
    assert took >= 4 * hold
    assert (span[:, 1] - span[:, 0] >= hold).all()


def test_a_full_block_has_its_sm_to_itself(host_gpu: Any) -> None:
    host_gpu.device(4)
    sm, span = np.full(12, -1, np.int32), np.zeros((12, 2), np.int64)
    host_gpu.queue("probe", 12, 1, [sm, span, np.uint64(1_000)], range(4), shared=BLOCK_SHARED)
    host_gpu.run()
    for one in range(4):
        mine = span[sm == one]
        mine = mine[mine[:, 0].argsort()]
        assert (mine[1:, 0] > mine[:-1, 1]).all()


def test_ends_although_the_timer_stands_still(host_gpu: Any) -> None:
    host_gpu.device(2, tick=0)
    sm, span = np.full(2, -1, np.int32), np.zeros((2, 2), np.uint64)
    host_gpu.queue("probe", 2, 1, [sm, span, np.uint64(1_000)], range(2), shared=BLOCK_SHARED)
    assert host_gpu.run() == 0
    assert set(sm.tolist()) == {0, 1}
