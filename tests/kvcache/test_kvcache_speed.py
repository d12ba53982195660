"""What the accounting costs; nothing is asserted on time."""

from __future__ import annotations

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from smpart.kvcache import BlockPool, BlockTable, block_hashes

TOKENS = 16_000


@pytest.mark.slow
def test_speed_of_hashing(benchmark: BenchmarkFixture) -> None:
    assert len(benchmark(block_hashes, range(100_000), 16)) == 6250


@pytest.mark.slow
@pytest.mark.parametrize("hit", [True, False], ids=["hit", "evict"])
def test_speed_of_a_requests_life(benchmark: BenchmarkFixture, hit: bool) -> None:
    pool = BlockPool(2 * TOKENS // 16)
    keys = [block_hashes(range(TOKENS), 16, salt=str(n)) for n in range(1 if hit else 4)]
    turn = 0

    def life() -> None:
        nonlocal turn
        hashes = keys[turn % len(keys)]
        table = BlockTable(pool)
        table.adopt(pool.acquire(hashes))
        table.ensure(TOKENS)
        table.publish_upto(TOKENS, hashes)
        table.release()
        turn += 1

    benchmark(life)
    pool.check()
