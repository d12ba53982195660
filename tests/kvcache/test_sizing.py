"""How big a pool becomes, and which wishes are refused."""

from __future__ import annotations

import re

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from smpart.errors import UsageError
from smpart.kvcache import KVConfig, KVLayout, blocks_that_fit, default_budget, pool_blocks

LAYOUT = KVLayout(layers=2, kv_heads=1, head_dim=8, dtype="float32", block_tokens=16)
MIB = 1 << 20


@given(budget=st.integers(-10, 10**9))
def test_as_many_blocks_as_fit(budget: int) -> None:
    blocks = blocks_that_fit(LAYOUT, budget)
    assert blocks >= 0
    assert blocks == 0 or LAYOUT.total_bytes(blocks) <= budget
    assert LAYOUT.total_bytes(blocks + 1) > budget


def test_the_default_is_a_share_of_what_weights_leave() -> None:
    assert default_budget(1000, 200, fraction=0.25) == 200
    assert default_budget(100, 200) == 0
    for fraction in (0.0, 1.5, float("nan")):
        with pytest.raises(UsageError, match="fraction"):
            default_budget(1000, 0, fraction)


def test_an_explicit_wish_is_taken_as_given() -> None:
    assert pool_blocks(KVConfig(blocks=77), LAYOUT, 64, 100 * MIB) == 77
    assert pool_blocks(KVConfig(memory_bytes=LAYOUT.total_bytes(9) + 1), LAYOUT, 64, 100 * MIB) == 9


def test_the_default_takes_no_more_than_requests_can_use() -> None:
    assert pool_blocks(KVConfig(max_requests=3), LAYOUT, 40, 1 << 40) == 3 * 3


@given(available=st.integers(0, 64 * MIB), weights=st.integers(0, 8 * MIB), max_len=st.integers(1, 4096))
def test_a_pool_holds_a_longest_request_and_fits_in_memory(available: int, weights: int, max_len: int) -> None:
    try:
        blocks = pool_blocks(KVConfig(), LAYOUT, max_len, available, weights)
    except UsageError:
        assume(False)
    assert blocks * LAYOUT.block_tokens >= max_len
    assert LAYOUT.total_bytes(blocks) <= available - weights


def test_a_pool_too_small_for_one_request_is_refused_with_a_way_out() -> None:
    with pytest.raises(UsageError, match=r"max_len=1000 tokens takes 63 KV blocks .* the pool has 4 ") as caught:
        pool_blocks(KVConfig(blocks=4), LAYOUT, 1000, 100 * MIB)
    [advice] = re.findall(r"max_len=(\d+)\)", str(caught.value))
    assert pool_blocks(KVConfig(blocks=4), LAYOUT, int(advice), 100 * MIB) == 4


def test_more_than_the_process_may_use_is_refused_with_what_would_fit() -> None:
    with pytest.raises(UsageError, match=r"may use 1\.0 MiB") as caught:
        pool_blocks(KVConfig(blocks=10**6), LAYOUT, 64, 2 * MIB, weights_bytes=MIB)
    [advice] = re.findall(r"at most (\d+) blocks", str(caught.value))
    assert pool_blocks(KVConfig(blocks=int(advice)), LAYOUT, 64, 2 * MIB, weights_bytes=MIB) == int(advice)


@pytest.mark.parametrize(
    "fields",
    [
        {"block_tokens": 0},
        {"block_tokens": 16.0},
        {"max_requests": -1},
        {"max_requests": True},
        {"max_len": 0},
        {"blocks": 0},
        {"memory_bytes": -5},
        {"memory_bytes": "4GiB"},
        {"dtype": "int3"},
        {"prefix_cache": "yes"},
    ],
)
def test_bad_settings_are_refused_early(fields: dict[str, object]) -> None:
    [name] = fields
    with pytest.raises(UsageError, match=name):
        KVConfig(**fields)  # type: ignore[arg-type]


def test_memory_and_blocks_together_are_refused() -> None:
    with pytest.raises(UsageError, match="give one"):
        KVConfig(memory_bytes=MIB, blocks=3)
