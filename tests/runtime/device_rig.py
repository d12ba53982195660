"""A device for bodies that is torch's CPU, with everything but CUDA itself: for `Rig` in conftest.py."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from tape import Tape

from smpart.partition import Side, Split
from smpart.partition.cuda.places import Place
from smpart.runtime.adapter import ModelAdapter
from smpart.runtime.board import Board
from smpart.runtime.device.attention import Attention, AttentionShape, Bucket, Scratch
from smpart.runtime.device.feed import DeviceFeed
from smpart.runtime.device.gather import GatherAttention
from smpart.runtime.device.graphs import DecodeGraphs


def place(split: Split | None = None) -> Place:
    split = split or Split(96, 36)
    return Place(Side.DECODE, split, split.decode, stream=7, context=1)


class Graph:
    """See `Replay`."""

    memory_bytes = 1 << 20

    def __init__(self, queue: CpuQueue, run: Callable[[], torch.Tensor]) -> None:
        self._queue, self._tape = queue, Tape(run)
        self.output = self._tape.output

    def __call__(self) -> None:
        self._queue.replays += 1
        self._tape.replay()


class CpuQueue:
    """Runs everything at once. A capture runs too, as CUDA's would not; a forward may run twice and nobody can tell."""

    def __init__(self) -> None:
        self.entered: list[Place] = []
        self.captured: list[Place] = []
        self.refuse: Exception | None = None
        self.replays = 0

    @contextmanager
    def at(self, place: Place) -> Iterator[None]:
        self.entered.append(place)
        yield

    def capture(self, place: Place, run: Callable[[], torch.Tensor]) -> Graph:
        if self.refuse is not None:
            raise self.refuse
        self.captured.append(place)
        return Graph(self, run)


def device_feed(
    adapter: ModelAdapter, board: Board, memory: list[torch.Tensor], *, graphs: bool = True, budget: int = 1 << 40
) -> tuple[DeviceFeed, CpuQueue]:
    """A feed over pages of which the last is nobody's, with tokens of its own: -1 where nothing was written yet."""
    facts, queue, where = adapter.facts, CpuQueue(), memory[0].device
    tokens = torch.full((board.slots + 1, board.max_len + 1), -1, dtype=torch.int32, device=where)
    tokens[-1] = 0
    sizes = AttentionShape(
        facts.heads, facts.kv_heads, facts.head_dim, board.block_tokens, facts.dtype, facts.scale or math.nan
    )
    scratch = Scratch(where)

    def attention(units: int, bucket: Bucket | None) -> Attention:
        return GatherAttention(sizes, scratch, units, bucket)

    captured = DecodeGraphs(queue, board.tables.shape[1], budget) if graphs else None
    return DeviceFeed(adapter, memory, tokens, board, queue, attention, captured), queue
