"""Paged attention against a dense one written out, and what it may and may not read."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from smpart.errors import UnsupportedModel
from smpart.runtime.attention import PagedCache, window_of
from smpart.runtime.batch import Batch, Chunk
from smpart.runtime.board import Board
from smpart.runtime.packing import Packing

SIZE, HEADS, KV_HEADS, DIM, MAX_LEN, SLOTS = 4, 4, 2, 8, 64, 4
BLOCKS = SLOTS * MAX_LEN // SIZE


def dense(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, window: int | None) -> torch.Tensor:
    """Attention of the last rows of one sequence, [n, heads, dim], in the order of the textbook."""
    total, new = len(keys), len(query)
    out = torch.empty_like(query)
    for row in range(new):
        end = total - new + row + 1
        start = max(0, end - window) if window else 0
        for head in range(HEADS):
            group = head // (HEADS // KV_HEADS)
            scores = keys[start:end, group] @ query[row, head] / math.sqrt(DIM)
            out[row, head] = scores.softmax(0) @ values[start:end, group]
    return out


class Pages:
    def __init__(self, seed: int, consecutive: bool) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.board = Board.over(bytearray(Board.size(SLOTS, MAX_LEN, SIZE)), SLOTS, MAX_LEN, SIZE)
        order = torch.arange(BLOCKS) if consecutive else torch.randperm(BLOCKS, generator=self.generator)
        self.board.tables[:] = order.reshape(SLOTS, -1).numpy()
        self.memory = [torch.full((2, BLOCKS, SIZE, KV_HEADS, DIM), torch.nan)]
        self.known: list[tuple[torch.Tensor, torch.Tensor]] = [(torch.empty(0, KV_HEADS, DIM),) * 2] * SLOTS

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator)

    def check(self, decode: list[int], chunks: list[Chunk], window: int | None) -> None:
        """Run one forward's attention and compare each sequence with the dense one."""
        positions = [len(self.known[slot][0]) for slot in decode]
        batch = Batch(np.array(decode, np.int32), np.array(positions, np.int32), tuple(chunks))
        packing = Packing(batch, self.board, torch.float32)
        total = packing.tokens.shape[1]
        query, key, value = (self.normal(1, heads, total, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
        cache = PagedCache(self.memory, packing, (window,))
        cache.update(key, value, 0)
        out = cache.attend(query, key, value, None, 1 / math.sqrt(DIM))
        decode_rows = dict(zip(decode, packing.sampled.tolist(), strict=False))
        ends = np.cumsum([c.length for c in chunks]) + len(decode)
        spans = [(slot, row, row + 1) for slot, row in decode_rows.items()]
        spans += [(c.slot, int(end) - c.length, int(end)) for c, end in zip(chunks, ends, strict=True)]
        for slot, first, last in spans:
            old_keys, old_values = self.known[slot]
            keys = torch.cat([old_keys, key[0, :, first:last].transpose(0, 1)])
            values = torch.cat([old_values, value[0, :, first:last].transpose(0, 1)])
            self.known[slot] = keys, values
            expected = dense(query[0, :, first:last].transpose(0, 1), keys, values, window)
            torch.testing.assert_close(out[0, first:last], expected, atol=1e-5, rtol=1e-5)


@settings(max_examples=30)
@given(st.data(), st.integers(0, 1000), st.booleans(), st.sampled_from([None, 1, 3, 4, 9]))
def test_any_mix_of_chunks_and_decode_rows_equals_dense_attention(data, seed, consecutive, window):
    pages = Pages(seed, consecutive)
    for _ in range(4):
        lengths = [len(keys) for keys, _ in pages.known]
        acts = [data.draw(st.sampled_from(["chunk", "decode", "rest"])) for _ in range(SLOTS)]
        decode = [slot for slot, act in enumerate(acts) if act == "decode" and lengths[slot]]
        chunks = [
            Chunk(slot, lengths[slot], data.draw(st.integers(1, 11)), True)
            for slot, act in enumerate(acts)
            if act == "chunk"
        ]
        if decode or chunks:
            pages.check(data.draw(st.permutations(decode)), chunks, window)


def test_very_different_contexts_decode_in_groups(monkeypatch):
    monkeypatch.setattr("smpart.runtime.packing._SLACK", 2)
    pages = Pages(1, consecutive=False)
    pages.check([], [Chunk(0, 0, 40, True), Chunk(1, 0, 3, True), Chunk(2, 0, 38, True), Chunk(3, 0, 17, True)], None)
    packing = Packing(
        Batch(np.arange(4, dtype=np.int32), np.array([40, 3, 38, 17], np.int32)), pages.board, torch.float32
    )
    assert [piece.rows for piece in packing.pieces(None)] == [slice(0, 2), slice(2, 3), slice(3, 4)]
    pages.check([0, 1, 2, 3], [], None)


def test_consecutive_blocks_are_read_in_place():
    pages = Pages(0, consecutive=True)
    packing = Packing(Batch(np.array([1], np.int32), np.array([9], np.int32)), pages.board, torch.float32)
    (piece,) = packing.pieces(None)
    memory = pages.memory[0]
    for read in piece.read(memory):
        assert read.untyped_storage().data_ptr() == memory.untyped_storage().data_ptr()
    assert piece.mask is None


def test_a_neighbours_nan_reaches_nobody():
    pages = Pages(3, consecutive=False)
    pages.check([], [Chunk(0, 0, 6, True), Chunk(1, 0, 13, True)], None)
    owned = pages.board.tables[:2]
    others = np.setdiff1d(np.arange(BLOCKS), owned.reshape(-1))
    assert pages.memory[0][:, others].isnan().all()  # nothing was written elsewhere
    pages.memory[0][:, others] = torch.inf
    pages.check([1, 0], [], None)


@pytest.mark.parametrize("window", [1, 7, 100])
def test_windows_are_read_off_transformers_masks(window):
    from transformers.masking_utils import causal_mask_function, sliding_window_causal_mask_function

    assert window_of(sliding_window_causal_mask_function(window), 64) == (window if window < 64 else None)
    assert window_of(causal_mask_function, 64) is None


def test_other_masks_are_refused():
    from transformers.masking_utils import bidirectional_mask_function, chunked_causal_mask_function

    for mask in (bidirectional_mask_function, chunked_causal_mask_function(8, torch.zeros(1, dtype=torch.int))):
        with pytest.raises(UnsupportedModel, match="sliding window"):
            window_of(mask, 64)
