"""Prefix keys: equal exactly for equal salts and equal tokens from the start."""

from __future__ import annotations

from hashlib import sha256
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smpart.errors import UsageError
from smpart.kvcache import HashChain, block_hashes

tokens_lists = st.lists(st.integers(0, 2**31 - 1), max_size=70)


def test_only_complete_blocks_have_keys() -> None:
    assert [len(block_hashes(range(n), 16)) for n in (0, 15, 16, 31, 32)] == [0, 0, 1, 1, 2]
    assert {len(key) for key in block_hashes(range(64), 16)} == {16}


def test_a_key_is_the_hash_of_the_parent_and_the_tokens() -> None:
    first, second = block_hashes([1, 2, 3, 4], 2)
    raw = (3).to_bytes(8, "little") + (4).to_bytes(8, "little")
    assert second == sha256(first + raw).digest()[:16]


@given(tokens=tokens_lists)
def test_every_kind_of_sequence_gives_the_same_keys(tokens: list[int]) -> None:
    expected = block_hashes(tokens, 4)
    for kind in (np.int32, np.int64, np.uint32, ">i8"):
        assert block_hashes(np.array(tokens, dtype=kind), 4) == expected
    assert block_hashes(tuple(tokens), 4) == expected


def test_ranges_and_strided_arrays() -> None:
    expected = block_hashes(list(range(10, 90, 2)), 4)
    assert block_hashes(range(10, 90, 2), 4) == expected
    assert block_hashes(np.arange(10, 90)[::2], 4) == expected


@settings(max_examples=50)
@given(tokens=tokens_lists, cuts=st.lists(st.integers(0, 70), max_size=8), salt=st.text(max_size=3))
def test_a_chain_extended_piecewise_equals_the_whole(tokens: list[int], cuts: list[int], salt: str) -> None:
    chain, new = HashChain(4, salt), []
    edges = [0, *sorted(min(c, len(tokens)) for c in cuts), len(tokens)]
    for start, stop in pairwise(edges):
        new += chain.extend(tokens[start:stop])
        assert chain.tokens == stop
    assert new == chain.hashes == block_hashes(tokens, 4, salt)


@settings(max_examples=50)
@given(a=st.lists(st.integers(0, 1), max_size=12), b=st.lists(st.integers(0, 1), max_size=12))
def test_keys_agree_exactly_on_the_common_prefix(a: list[int], b: list[int]) -> None:
    for index, (x, y) in enumerate(zip(block_hashes(a, 2), block_hashes(b, 2), strict=False)):
        end = (index + 1) * 2
        assert (x == y) == (a[:end] == b[:end])


def test_salt_block_size_and_order_separate() -> None:
    tokens = [5] * 8
    keys = [
        *block_hashes(tokens, 4),
        *block_hashes(tokens, 4, "a"),
        *block_hashes(tokens, 4, "b"),
        *block_hashes(tokens, 2),
        *block_hashes(tokens, 8),
    ]
    assert len(set(keys)) == len(keys)
    assert block_hashes(tokens, 4, "a") == block_hashes(tokens, 4, b"a")


def test_keys_given_from_elsewhere_are_continued() -> None:
    whole = block_hashes(range(8), 4)
    chain = HashChain(4)
    chain.hashes.append(whole[0])
    assert chain.tokens == 4
    assert chain.extend(range(4, 8)) == whole[1:]


@pytest.mark.parametrize("tokens", [[[1, 2]], [1.5, 2.0], np.zeros((1, 4), dtype=np.int32), ["a", "b"], [True, False]])
def test_what_is_not_a_row_of_integers_is_refused(tokens: object) -> None:
    with pytest.raises(UsageError, match="one row of integers"):
        block_hashes(tokens, 2)  # type: ignore[arg-type]


def test_an_impossible_block_size_is_refused() -> None:
    with pytest.raises(UsageError, match="block_tokens=0"):
        HashChain(0)
