"""What single operations of the block pool and block tables promise."""

from __future__ import annotations

import pytest

from smpart.errors import SmpartError, UsageError
from smpart.kvcache import BlockPool, BlockTable, OutOfBlocks, block_hashes


def filled(pool: BlockPool, tokens: list[int], salt: str = "") -> BlockTable:
    """A table of completely written and published blocks, reusing what is cached."""
    hashes = block_hashes(tokens, pool.block_tokens, salt)
    table = BlockTable(pool)
    table.adopt(pool.acquire(hashes))
    table.ensure(len(tokens))
    table.publish_upto(len(tokens), hashes)
    return table


def counts(pool: BlockPool) -> tuple[int, int, int]:
    pool.check()
    return pool.free, pool.owned, pool.cached


def test_a_new_pool_is_free() -> None:
    pool = BlockPool(8)
    assert (pool.blocks, pool.block_tokens) == (8, 16)
    assert counts(pool) == (8, 0, 0)


@pytest.mark.parametrize(("blocks", "block_tokens"), [(0, 16), (-1, 16), (4, 0)])
def test_impossible_pools_are_refused(blocks: int, block_tokens: int) -> None:
    with pytest.raises(UsageError, match="at least 1"):
        BlockPool(blocks, block_tokens)


def test_allocation_is_all_or_nothing() -> None:
    pool = BlockPool(4)
    pool.allocate(2)
    with pytest.raises(OutOfBlocks, match="3 KV blocks wanted, 2 of 4") as caught:
        pool.allocate(3)
    assert isinstance(caught.value, SmpartError)
    assert counts(pool) == (2, 2, 0)
    assert pool.allocate(0) == []


def test_ids_are_consecutive_and_stay_so_after_reuse() -> None:
    pool = BlockPool(8)
    first = pool.allocate(4)
    assert first == [0, 1, 2, 3]
    pool.release(first)
    assert pool.allocate(6) == [0, 1, 2, 3, 4, 5]


def test_never_published_blocks_go_before_cached_ones() -> None:
    pool = BlockPool(4, block_tokens=2)
    filled(pool, [1, 2, 3, 4]).release()
    assert counts(pool) == (4, 0, 2)
    assert pool.allocate(2) == [2, 3]
    assert (pool.evictions, pool.cached) == (0, 2)


def test_eviction_takes_the_least_recently_used_chain_from_its_leaf() -> None:
    pool = BlockPool(6, block_tokens=1)
    old, new = block_hashes([1, 2, 3], 1), block_hashes([7, 8, 9], 1)
    filled(pool, [1, 2, 3]).release()
    filled(pool, [7, 8, 9]).release()
    seen = []
    for _ in range(6):
        pool.allocate(1)
        seen.append((pool.match(old), pool.match(new)))
    assert seen == [(2, 3), (1, 3), (0, 3), (0, 2), (0, 1), (0, 0)]
    assert pool.evictions == 6


def test_use_makes_a_chain_recent() -> None:
    pool = BlockPool(4, block_tokens=1)
    old, new = block_hashes([1, 2], 1), block_hashes([7, 8], 1)
    filled(pool, [1, 2]).release()
    filled(pool, [7, 8]).release()
    pool.release(pool.acquire(old))
    pool.allocate(2)
    assert (pool.match(old), pool.match(new)) == (2, 0)


def test_a_pool_full_of_evictable_blocks_serves_everyone() -> None:
    """sglang#30532: all blocks cached, and yet no request could start."""
    pool = BlockPool(8, block_tokens=2)
    for start in range(0, 400, 16):
        table = filled(pool, list(range(start, start + 16)))
        assert len(table.ids) == 8
        table.release()
        assert counts(pool) == (8, 0, 8)


def test_shared_blocks_are_freed_by_their_last_owner() -> None:
    pool = BlockPool(8, block_tokens=2)
    first = filled(pool, [1, 2, 3, 4])
    second = filled(pool, [1, 2, 3, 4, 5, 6])
    assert second.ids[:2] == first.ids
    assert counts(pool) == (5, 3, 0)
    first.release()
    assert counts(pool) == (5, 3, 0)
    second.release()
    assert counts(pool) == (8, 0, 3)


def test_matching_changes_nothing_and_acquiring_stops_at_the_first_gap() -> None:
    pool = BlockPool(8, block_tokens=1)
    table = filled(pool, [1, 2, 3])
    hashes = block_hashes([1, 2, 9, 3], 1)
    before = counts(pool), pool.queries, pool.hits
    assert pool.match(hashes) == 2
    assert pool.match([]) == 0
    assert (counts(pool), pool.queries, pool.hits) == before
    assert pool.acquire(hashes) == table.ids[:2]


def test_hit_counters_count_tokens() -> None:
    pool = BlockPool(8, block_tokens=4)
    filled(pool, list(range(8))).release()
    filled(pool, list(range(12)))
    assert (pool.queries, pool.hits) == (8 + 12, 8)


def test_unwritten_blocks_of_an_aborted_request_are_free_not_cached() -> None:
    pool = BlockPool(8, block_tokens=4)
    hashes = block_hashes(range(16), 4)
    table = BlockTable(pool)
    table.ensure(16)
    table.publish_upto(9, hashes)
    assert table.published == 2 and pool.match(hashes) == 2
    table.release()
    assert counts(pool) == (8, 0, 2)
    table.release()
    assert counts(pool) == (8, 0, 2)


def test_tenants_with_different_salts_never_share() -> None:
    pool = BlockPool(8, block_tokens=2)
    alice = filled(pool, [1, 2, 3, 4], salt="alice")
    bob = filled(pool, [1, 2, 3, 4], salt="bob")
    assert not set(alice.ids) & set(bob.ids)
    alice.release()
    assert pool.acquire(block_hashes([1, 2, 3, 4], 2)) == []


def test_equal_blocks_under_different_prefixes_are_different() -> None:
    pool = BlockPool(8, block_tokens=2)
    first = filled(pool, [1, 1, 5, 5])
    second = filled(pool, [2, 2, 5, 5])
    assert not set(first.ids) & set(second.ids)


def test_the_first_published_twin_stays_canonical() -> None:
    pool = BlockPool(4, block_tokens=1)
    [one], [two] = pool.allocate(1), pool.allocate(1)
    assert pool.publish(one, b"x") == one
    assert pool.publish(one, b"x") == one
    assert pool.publish(two, b"x") == one
    assert pool.acquire([b"x"]) == [one]
    pool.release([two])
    assert counts(pool) == (3, 1, 0)


def test_a_twin_takes_the_place_of_an_evicted_one() -> None:
    pool = BlockPool(2, block_tokens=1)
    [one], [two] = pool.allocate(1), pool.allocate(1)
    pool.publish(one, b"x")
    pool.publish(two, b"x")
    pool.release([one])
    [three] = pool.allocate(1)
    assert three == one and pool.match([b"x"]) == 0
    pool.release([two])
    assert pool.match([b"x"]) == 1
    assert counts(pool) == (1, 1, 1)


def test_a_released_twin_keeps_the_common_parent_ahead_of_its_child() -> None:
    pool = BlockPool(4, block_tokens=1)
    hashes = block_hashes([1, 2], 1)
    parent, child = BlockTable(pool), BlockTable(pool)
    parent.ensure(1)
    child.ensure(2)
    parent.publish_upto(1, hashes)
    child.publish_upto(2, hashes)
    parent.release()
    child.release()
    pool.allocate(3)
    assert pool.match(hashes) == 1


def test_pinned_blocks_are_not_given_away() -> None:
    pool = BlockPool(3, block_tokens=1)
    table = filled(pool, [1, 2])
    ids = table.ids
    table.release()
    pool.pin(ids)
    pool.pin(ids)
    assert counts(pool) == (1, 0, 2)
    with pytest.raises(OutOfBlocks):
        pool.allocate(2)
    pool.clear_cached()
    pool.unpin(ids)
    assert counts(pool) == (1, 0, 2)
    pool.unpin(ids)
    assert counts(pool) == (3, 0, 2)
    pool.allocate(2)
    assert pool.match(block_hashes([1, 2], 1)) == 1


def test_pinned_cached_blocks_can_be_hit() -> None:
    pool = BlockPool(2, block_tokens=1)
    table = filled(pool, [1])
    pool.pin(table.ids)
    table.release()
    assert counts(pool) == (1, 0, 1)
    hit = pool.acquire(block_hashes([1], 1))
    pool.unpin(hit)
    assert counts(pool) == (1, 1, 0)
    pool.release(hit)
    assert counts(pool) == (2, 0, 1)


@pytest.mark.parametrize("landed", [True, False])
def test_an_abort_during_an_asynchronous_load_leaks_nothing(landed: bool) -> None:
    """vllm#46283: the request is gone while its blocks are still being written."""
    pool = BlockPool(4, block_tokens=1)
    hashes = block_hashes([1, 2], 1)
    table = BlockTable(pool)
    loading = list(table.ensure(2))
    pool.pin(loading)
    table.release()
    assert counts(pool) == (2, 2, 0)
    if landed:
        for block, key in zip(loading, hashes, strict=True):
            pool.publish(block, key)
        assert counts(pool) == (2, 0, 2)
    pool.unpin(loading)
    assert counts(pool) == (4, 0, 2 if landed else 0)
    assert pool.match(hashes) == (2 if landed else 0)


def test_clear_cached_forgets_only_what_nobody_uses() -> None:
    pool = BlockPool(4, block_tokens=1)
    used = filled(pool, [1])
    filled(pool, [7, 8]).release()
    pool.clear_cached()
    assert counts(pool) == (3, 1, 0)
    assert (pool.match(block_hashes([1], 1)), pool.match(block_hashes([7], 1))) == (1, 0)
    assert pool.evictions == 0
    used.release()


def test_faults_of_the_caller_are_named() -> None:
    pool = BlockPool(4, block_tokens=1)
    table = filled(pool, [1])
    with pytest.raises(AssertionError, match="double free"):
        pool.release([3])
    with pytest.raises(AssertionError, match="double free"):
        pool.release([-1])
    with pytest.raises(AssertionError, match="double free"):
        pool.release([table.ids[0], table.ids[0]])
    with pytest.raises(AssertionError, match="is free"):
        pool.publish(3, b"x")
    with pytest.raises(AssertionError, match="is free"):
        pool.pin([3])
    with pytest.raises(AssertionError, match="does not exist"):
        pool.pin([4])
    with pytest.raises(AssertionError, match="not pinned"):
        pool.unpin([0])
    with pytest.raises(AssertionError, match="another hash"):
        pool.publish(0, b"x")
    with pytest.raises(AssertionError, match="wanted"):
        pool.allocate(-1)
    pool.check()


def test_a_table_grows_by_what_is_missing() -> None:
    pool = BlockPool(4, block_tokens=16)
    table = BlockTable(pool)
    assert (table.missing(0), table.missing(1), table.missing(16), table.missing(17)) == (0, 1, 1, 2)
    assert table.ensure(17) == [0, 1]
    assert (table.missing(32), table.missing(33), table.capacity) == (0, 1, 32)
    assert table.ensure(20) == []
    with pytest.raises(OutOfBlocks):
        table.ensure(65)
    assert table.ids == [0, 1] and counts(pool) == (2, 2, 0)


def test_a_table_refuses_what_cannot_be() -> None:
    pool = BlockPool(4, block_tokens=16)
    table = BlockTable(pool)
    table.ensure(16)
    with pytest.raises(AssertionError, match="cannot adopt"):
        table.adopt([3])
    with pytest.raises(AssertionError, match="17 tokens written"):
        table.publish_upto(17, [b"x"])


def test_blocks_without_a_key_are_published_later() -> None:
    pool = BlockPool(4, block_tokens=1)
    table = BlockTable(pool)
    table.ensure(3)
    table.publish_upto(3, [b"a"])
    assert table.published == 1
    table.publish_upto(3, [b"a", b"b", b"c"])
    assert (table.published, pool.match([b"a", b"b", b"c"])) == (3, 3)
    table.publish_upto(1, [b"a"])
    assert table.published == 3
