"""Works for lanes that serve nobody: forwards of any size, on slots and blocks of the profiler's own."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from smpart.errors import UsageError
from smpart.partition import Shape, Side, Split, Work
from smpart.profiler.experiment import Chunks
from smpart.runtime.batch import NO_ROWS, Batch, Chunk, Sampler, Segment
from smpart.runtime.board import Noticeboard
from smpart.runtime.sampling import SamplingParams

MOST_CHUNKS = 8
"""Chunks that a forward may pack."""

_ANYBODY = Sampler(SamplingParams(), 1, 0)
_TOKENS = (3, 500)
"""Ids from here to there are in every vocabulary and end nothing."""


class Works:
    """Makes works that read and write one board and KV memory.

    Chunks and decode rows have slots and blocks apart, so that what one lane writes the other does not read. Within
    a side blocks are handed out from its first one on, round and round where there are too few: what is computed is
    thrown away. A context is whatever lies in its blocks.

    A work holds until another of its side is made: both have the same slots.

    Args:
        board: its tokens and tables are overwritten.
        blocks: of the KV memory, all of which may be overwritten.
        block_tokens: tokens in one block.
    """

    def __init__(self, board: Noticeboard, blocks: int, block_tokens: int, seed: int = 0) -> None:
        self._board = board
        self._block_tokens = block_tokens
        slots = board.slots
        self.chunk_slots = range(min(MOST_CHUNKS, max(1, slots // 2)))
        self.row_slots = range(len(self.chunk_slots) if slots > 1 else 0, slots)
        longest = -(-board.max_len // block_tokens)
        own = min(longest + MOST_CHUNKS, max(1, blocks // 2))
        self._chunk_blocks = range(own)
        self._row_blocks = range(own if blocks > 1 else 0, blocks)
        self._numbers = itertools.count(1)
        tokens = np.random.default_rng(seed).integers(*_TOKENS, self.longest + 1).tolist()
        for slot in range(slots):
            board.write_tokens(slot, tokens)

    @property
    def longest(self) -> int:
        """Tokens, new ones and context, that one sequence may have."""
        per_side = min(len(self._chunk_blocks), len(self._row_blocks))
        return max(1, min(self._board.max_len - 1, per_side * self._block_tokens - 1))

    @property
    def chunk_tokens(self) -> int:
        """Tokens, new ones and context, that all chunks of a forward may have without sharing a block."""
        return self._block_tokens * max(1, len(self._chunk_blocks) - MOST_CHUNKS)

    def row_tokens(self, rows: int) -> int:
        """Tokens that each of so many decode rows may have without sharing a block; 0: not even one."""
        return min(self.longest, len(self._row_blocks) // rows * self._block_tokens - 1)

    def prefill(self, split: Split, chunks: Chunks) -> Work:
        """One whole prefill of packed chunks. Raises `UsageError` if it does not fit the board."""
        return self._work(Side.PREFILL, split, chunks, 0, 0)

    def decode(self, split: Split, rows: int, context: int) -> Work:
        """One step of `rows` sequences that attend to `context` tokens each. Raises as `prefill` does."""
        return self._work(Side.DECODE, split, (), rows, context)

    def hybrid(self, split: Split, chunks: Chunks, rows: int, context: int) -> Work:
        """Both in one forward, on the decode lane. Raises as `prefill` does."""
        return self._work(Side.DECODE, split, chunks, rows, context)

    def foreign(self, side: Side, split: Split, payload: object) -> Work:
        """A payload that is no forward."""
        return Work(self._number(), side, split, Shape(), 1.0, payload)

    def again(self, work: Work) -> Work:
        """The same work once more, to be launched while the other may still be in flight."""
        return Work(self._number(), work.side, work.split, work.shape, work.fraction, work.payload)

    def _number(self) -> int:
        return -next(self._numbers)  # an engine that serves on these lanes later counts upwards

    def _work(self, side: Side, split: Split, chunks: Chunks, rows: int, context: int) -> Work:
        self._check(chunks, rows, context)
        number, shape = self._number(), Shape.decode(rows, rows * context).join(Shape.prefill(chunks))
        parts = tuple(
            Chunk(slot, old, new, sample=True) for slot, (new, old) in zip(self.chunk_slots, chunks, strict=False)
        )
        slots = np.array(self.row_slots[:rows], dtype=np.int32) if rows else NO_ROWS
        self._lay_out(self._chunk_blocks, [(chunk.slot, chunk.start + chunk.length + 1) for chunk in parts])
        self._lay_out(self._row_blocks, [(slot, context + 1) for slot in self.row_slots[:rows]])
        batch = Batch(slots, np.full(rows, context - 1, dtype=np.int32), parts)
        samplers = dict.fromkeys([*slots.tolist(), *(chunk.slot for chunk in parts)], _ANYBODY)
        return Work(number, side, split, shape, 1.0, Segment(number, batch, samplers=samplers))

    def _lay_out(self, blocks: range, sequences: Sequence[tuple[int, int]]) -> None:
        """Give each sequence, `(slot, tokens)`, its blocks."""
        first = 0
        for slot, tokens in sequences:
            count = -(-tokens // self._block_tokens)
            ids = [blocks[(first + i) % len(blocks)] for i in range(count)]
            self._board.append_blocks(slot, 0, ids)
            first += count

    def _check(self, chunks: Chunks, rows: int, context: int) -> None:
        if len(chunks) > len(self.chunk_slots) or rows > len(self.row_slots):
            raise UsageError(
                f"{len(chunks)} chunks and {rows} rows: there are slots for {len(self.chunk_slots)} and "
                f"{len(self.row_slots)}"
            )
        if any(new < 1 or old < 0 for new, old in chunks) or (rows and context < 1) or not (chunks or rows):
            raise UsageError("a forward needs chunks of at least one token, or rows with a context of at least one")
        longest = max([new + old for new, old in chunks] + [context])
        if longest > self.longest:
            raise UsageError(f"a sequence of {longest} tokens: there is room for {self.longest}")
