"""Works for lanes that serve nobody: prefills and decode steps over blocks and slots of their own."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from smpart.errors import SmpartError
from smpart.partition import Completion, Lanes, Shape, Side, Split, Work
from smpart.runtime.batch import NO_ROWS, Batch, Chunk, Sampler, Segment
from smpart.runtime.board import Board
from smpart.runtime.sampling import SamplingParams


class Loads:
    """Makes works and runs them.

    A slot's blocks are its own, so that what one lane writes the other does not read: prefills have slot 0, decode
    rows the slots after it.

    Args:
        blocks: of the KV memory.
    """

    def __init__(self, lanes: Lanes, board: Board, blocks: int, seed: int = 0) -> None:
        self.lanes = lanes
        self._board = board
        self._blocks = blocks
        self._numbers = itertools.count(1)
        self._random = np.random.default_rng(seed)

    def prefill(self, split: Split, tokens: int) -> Work:
        """One whole prefill of `tokens` random tokens."""
        self._lay_out([0], tokens, 0)
        batch = Batch(NO_ROWS, NO_ROWS, (Chunk(0, 0, tokens, sample=True),))
        return self._work(Side.PREFILL, split, Shape.prefill([(tokens, 0)]), batch, [0])

    def decode(self, split: Split, rows: int, context: int) -> Work:
        """One step of `rows` sequences that attend to `context` tokens each."""
        slots = list(range(1, rows + 1))
        self._lay_out(slots, context, self._board.tables.shape[1])
        batch = Batch(np.array(slots, np.int32), np.full(rows, context - 1, np.int32))
        return self._work(Side.DECODE, split, Shape.decode(rows, rows * context), batch, slots)

    def again(self, work: Work, split: Split | None = None) -> Work:
        """The same work once more, to be launched while the other may still be in flight."""
        return Work(next(self._numbers), work.side, split or work.split, work.shape, work.fraction, work.payload)

    def run(self, work: Work) -> Completion:
        """Launch a work on idle lanes and wait for its end. Raises `SmpartError` if it fails."""
        self.lanes.launch(work)
        (done,) = self.wait(1)
        return done

    def wait(self, count: int) -> list[Completion]:
        """At least `count` completions. Raises `SmpartError` if one failed."""
        done: list[Completion] = []
        while len(done) < count:
            done += self.lanes.wait(None)
        failed = next((completion.fault for completion in done if completion.fault is not None), None)
        if failed is not None:
            raise SmpartError(f"a forward failed: {failed.message}")
        return done

    def _lay_out(self, slots: Sequence[int], tokens: int, first_block: int) -> None:
        each = -(-(tokens + 1) // self._board.block_tokens)
        if tokens + 1 > self._board.max_len or first_block + each * len(slots) > self._blocks:
            raise SmpartError(f"{len(slots)} rows of {tokens} tokens do not fit {self._blocks} blocks")
        for index, slot in enumerate(slots):
            start = first_block + index * each
            self._board.append_blocks(slot, 0, range(start, start + each))
            self._board.tokens[slot, :tokens] = self._random.integers(3, 500, tokens)

    def _work(self, side: Side, split: Split, shape: Shape, batch: Batch, slots: Sequence[int]) -> Work:
        number = next(self._numbers)
        samplers = {slot: Sampler(SamplingParams(), 1, 0) for slot in slots}
        return Work(number, side, split, shape, 1.0, Segment(number, batch, samplers=samplers))
