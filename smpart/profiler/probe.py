"""A first look at a device: a few forwards on idle lanes, so that the first plan already knows its speed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from smpart.errors import SmpartError
from smpart.partition import Completion, Lanes, Shape, Side, Split, Work
from smpart.runtime.batch import NO_ROWS, Batch, Chunk, Sampler, Segment
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
        self._lay_out(1, tokens, 0)
        batch = Batch(NO_ROWS, NO_ROWS, (Chunk(0, 0, tokens, sample=True),))
        return self._work(side, split, Shape.prefill([(tokens, 0)]), batch)

    def decode(self, side: Side, split: Split, rows: int, context: int, first_slot: int = 0) -> Work:
        """A decode step of `rows` sequences with `context` tokens each, ready to launch."""
        rows = max(1, min(rows, self._board.slots - first_slot))
        context = max(1, min(context, self._reach - 1))
        self._lay_out(rows, context, first_slot)
        slots = np.arange(first_slot, first_slot + rows, dtype=np.int32)
        batch = Batch(slots, np.full(rows, context - 1, dtype=np.int32))
        return self._work(side, split, Shape.decode(rows, rows * context), batch)

    def run(self, work: Work) -> float:
        """Seconds that one work takes alone. Raises `SmpartError` if it fails."""
        self._lanes.launch(work)
        return self._collect(work)[-1].seconds

    def side_by_side(self, split: Split, steps: int) -> list[Probe]:
        """Decode steps while a prefill runs beside them; the steps that had it beside them all the while."""
        prefill = self.prefill(Side.PREFILL, split, 128)
        self._lanes.launch(prefill)
        probes: list[Probe] = []
        for _ in range(steps):
            work = self.decode(Side.DECODE, split, 4, 64, first_slot=1)
            self._lanes.launch(work)
            done = self._collect(work)
            if any(completion.work is prefill for completion in done):
                return probes
            probes.append(Probe(work.shape, work.units, prefill.shape, done[-1].seconds))
        self._collect(prefill)
        return probes

    def _collect(self, work: Work) -> list[Completion]:
        """Completions up to that of `work`, which comes last. Raises `SmpartError` if one failed."""
        done: list[Completion] = []
        while not done or done[-1].work is not work:
            done += sorted(self._lanes.wait(None), key=lambda completion: completion.work is work)
        failed = next((completion.fault for completion in done if completion.fault is not None), None)
        if failed is not None:
            raise SmpartError(f"the first forwards failed: {failed.message}")
        return done

    def _lay_out(self, rows: int, tokens: int, first_slot: int) -> None:
        """Tokens and blocks for some slots. Blocks may be shared: what is computed is thrown away."""
        each = -(-(tokens + 1) // self._board.block_tokens)
        blocks = max(1, self._reach // self._board.block_tokens)
        for row in range(rows):
            table = [(row * each + i) % blocks for i in range(each)]
            self._board.append_blocks(first_slot + row, 0, table[: self._board.tables.shape[1]])
            self._board.write_tokens(first_slot + row, [1] * tokens)

    def _work(self, side: Side, split: Split, shape: Shape, batch: Batch) -> Work:
        self._number += 1
        slots = [*batch.decode_slots.tolist(), *(c.slot for c in batch.chunks)]
        samplers = {slot: Sampler(SamplingParams(), 1, 0) for slot in slots}
        return Work(-self._number, side, split, shape, 1.0, Segment(-self._number, batch, samplers=samplers))


def first_look(prober: Prober, splits: tuple[Split, ...], budget_s: float, now: Callable[[], float]) -> Iterator[Probe]:
    """Probe a few shapes alone, on the whole device and on half of it, then both lanes side by side.

    Each lane is warmed up once, unmeasured. The most telling probes come first; it stops when `budget_s` seconds are
    used up.

    Args:
        splits: every split there is, in order of prefill units.
        now: the lanes' clock.
    """
    begun = now()
    half = splits[len(splits) // 2]
    prober.run(prober.prefill(Side.PREFILL, splits[-1], 8))
    prober.run(prober.decode(Side.DECODE, splits[0], 1, 8))
    for work in _alone(prober, splits, half):
        yield Probe(work.shape, work.units, Shape(), prober.run(work))
        if now() - begun > budget_s:
            return
    if not half.exclusive:
        yield from prober.side_by_side(half, steps=3)


def _alone(prober: Prober, splits: tuple[Split, ...], half: Split) -> Iterator[Work]:
    for prefill, decode in ((splits[-1], splits[0]), (half, half)):
        if prefill.prefill and decode.decode:
            yield prober.prefill(Side.PREFILL, prefill, 64)
            yield prober.decode(Side.DECODE, decode, 1, 64)
            yield prober.decode(Side.DECODE, decode, 8, 64)
    yield prober.prefill(Side.PREFILL, splits[-1], 256)
