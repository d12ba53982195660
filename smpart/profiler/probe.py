"""A first look at a device: a few forwards on idle lanes, so that the first plan already knows its speed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from smpart.errors import SmpartError
from smpart.partition import Lanes, Shape, Side, Split, Work
from smpart.runtime.batch import Batch, Chunk, Sampler, Segment
from smpart.runtime.board import Board
from smpart.runtime.sampling import SamplingParams


class Probe(NamedTuple):
    """One measured forward: `seconds` of `shape` on `units` units beside `neighbour` (empty: alone)."""

    shape: Shape
    units: int
    neighbour: Shape
    seconds: float


class Prober:
    """Runs probe forwards on the first slots and blocks of an unused board. Not for lanes that serve requests.

    Args:
        board: its first slots' tokens and tables are overwritten.
        blocks: blocks of the KV memory, from 0 on, that may be overwritten.
    """

    def __init__(self, lanes: Lanes, board: Board, blocks: int) -> None:
        self._lanes = lanes
        self._board = board
        self._reach = min(board.max_len, blocks * board.block_tokens)
        self._number = 0

    def prefill(self, side: Side, split: Split, tokens: int) -> Work:
        """A prefill of `tokens` tokens, ready to launch."""
        tokens = max(1, min(tokens, self._reach - 1))
        self._lay_out(1, tokens)
        batch = Batch(_NO_ROWS, _NO_ROWS, (Chunk(0, 0, tokens, sample=True),))
        return self._work(side, split, Shape.prefill([(tokens, 0)]), batch)

    def decode(self, side: Side, split: Split, rows: int, context: int) -> Work:
        """A decode step of `rows` sequences with `context` tokens each, ready to launch."""
        rows = max(1, min(rows, self._board.slots, self._reach // self._board.block_tokens))
        context = max(1, min(context, self._reach // rows - self._board.block_tokens, self._board.max_len - 1))
        self._lay_out(rows, context)
        slots = np.arange(rows, dtype=np.int32)
        batch = Batch(slots, np.full(rows, context - 1, dtype=np.int32))
        return self._work(side, split, Shape.decode(rows, rows * context), batch)

    def run(self, work: Work) -> float:
        """Seconds that one work takes alone. Raises `SmpartError` if it fails."""
        self._lanes.launch(work)
        completions = self._lanes.wait(None)
        while not completions:
            completions = self._lanes.wait(None)
        (completion,) = completions
        if completion.fault is not None:
            raise SmpartError(f"the first forward on the {work.side} lane failed: {completion.fault.message}")
        return completion.seconds

    def _lay_out(self, rows: int, tokens: int) -> None:
        each = -(-(tokens + 1) // self._board.block_tokens)
        for row in range(rows):
            blocks = [(row * each + i) % max(1, self._reach // self._board.block_tokens) for i in range(each)]
            self._board.append_blocks(row, 0, blocks[: self._board.tables.shape[1]])
            self._board.write_tokens(row, [1] * tokens)

    def _work(self, side: Side, split: Split, shape: Shape, batch: Batch) -> Work:
        self._number += 1
        slots = [*batch.decode_slots.tolist(), *(c.slot for c in batch.chunks)]
        samplers = {slot: Sampler(SamplingParams(), 1, 0) for slot in slots}
        return Work(-self._number, side, split, shape, 1.0, Segment(-self._number, batch, samplers=samplers))


def first_look(prober: Prober, splits: tuple[Split, ...], budget_s: float, now: Callable[[], float]) -> Iterator[Probe]:
    """Probe a few shapes on the whole device and on an even split; stops when `budget_s` seconds are used up.

    The cheapest and most telling probes come first: each lane is warmed up once, unmeasured.
    """
    whole, half = splits[-1], splits[len(splits) // 2]
    begun = now()
    for side, split in ((Side.PREFILL, whole), (Side.DECODE, splits[0])):
        prober.run(prober.decode(side, split, 1, 16))
    for split in (whole, half):
        decode_split = splits[0] if split is whole else split
        for side, units, make in (
            (Side.PREFILL, split.prefill, lambda s, sp: prober.prefill(s, sp, 64)),
            (Side.DECODE, decode_split.decode, lambda s, sp: prober.decode(s, sp, 1, 64)),
            (Side.DECODE, decode_split.decode, lambda s, sp: prober.decode(s, sp, 8, 64)),
            (Side.PREFILL, split.prefill, lambda s, sp: prober.prefill(s, sp, 256)),
        ):
            work = make(side, split if side is Side.PREFILL else decode_split)
            if units == 0:
                continue
            yield Probe(work.shape, work.units, Shape(), prober.run(work))
            if now() - begun > budget_s:
                return


_NO_ROWS = np.zeros(0, dtype=np.int32)
