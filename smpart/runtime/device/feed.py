"""`Feed` of a model on a device: index tensors go up in one copy, decode steps are replayed from captured graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import cast

from torch import Tensor

from smpart.partition.cuda.places import Place
from smpart.runtime.adapter import ModelAdapter
from smpart.runtime.batch import Batch
from smpart.runtime.board import Board
from smpart.runtime.device.attention import Attention, Bucket
from smpart.runtime.device.graphs import DecodeGraphs
from smpart.runtime.device.layout import Spare, lay_out
from smpart.runtime.device.packing import DevicePacking
from smpart.runtime.device.queue import Queue
from smpart.runtime.feed import check_memory
from smpart.runtime.packing import Packed

MakeAttention = Callable[[int, Bucket | None], Attention]
"""Makes an attention for a lane of so many units; with a bucket, one for a captured step."""


class DeviceFeed:
    """One lane's. What both lanes share (pages, tokens) was made before either, and outlives them.

    Args:
        memory: KV pages on the device, one tensor a layer, [2, blocks + 1, block_tokens, kv_heads, head_dim]: the
            last block is nobody's.
        tokens: int32[slots + 1, max_len + 1] on the device: the last slot is nobody's, and the last column takes
            what a step that ran ahead samples past a request's end.
        board: the engine's, with the block tables, and the tokens of prompts.
        graphs: None: steps are not captured.

    Raises:
        UsageError: the memory does not fit the model.
    """

    def __init__(
        self,
        adapter: ModelAdapter,
        memory: Sequence[Tensor],
        tokens: Tensor,
        board: Board,
        queue: Queue,
        attention: MakeAttention,
        graphs: DecodeGraphs | None = None,
    ) -> None:
        check_memory(adapter, memory, board)
        self.adapter = adapter
        self.tokens = tokens
        self._memory = memory
        self._board = board
        self._queue = queue
        self._attention = attention
        self._graphs = graphs
        self._spare = Spare(board.slots, memory[0].shape[1] - 1)
        self._place: Place | None = None

    @contextmanager
    def at(self, place: Place) -> Iterator[None]:
        """See `Feed`."""
        self._place = place
        with self._queue.at(place):
            yield

    def pack(self, batch: Batch) -> DevicePacking:
        """See `Feed`."""
        assert self._place is not None
        layout = lay_out(batch, self._board, self._spare)
        return DevicePacking(layout, self.tokens, self._attention(self._place.units, None))

    def whole(self, batch: Batch) -> tuple[Packed, Tensor]:
        """See `Feed`."""
        assert self._place is not None
        graphs, bucket = self._graphs, self._bucket(batch)
        if graphs is not None and bucket is not None:
            step = graphs.find(self._place, bucket)
            if step is not None:
                return step.run(lay_out(batch, self._board, self._spare, bucket))
            if graphs.wanted(self._place, bucket):
                return self._first(graphs, self._place, bucket, batch)
        packing = self.pack(batch)
        return packing, self.forward(packing)

    def forward(self, packing: Packed) -> Tensor:
        """See `Feed`."""
        return self.adapter.forward(self._memory, packing)

    def _first(self, graphs: DecodeGraphs, place: Place, bucket: Bucket, batch: Batch) -> tuple[Packed, Tensor]:
        """Run a step that will be replayed from now on: once as it is, which loads its kernels, and then captured."""
        layout = lay_out(batch, self._board, self._spare, bucket)
        packing = DevicePacking(layout, self.tokens, self._attention(place.units, bucket))
        logits = self.forward(packing)[: len(layout.slots)]
        graphs.capture(place, bucket, packing, self.forward)
        return packing, logits

    def _bucket(self, batch: Batch) -> Bucket | None:
        """The captured size that a batch of nothing but decode rows is padded to."""
        if self._graphs is None or batch.chunks:
            return None
        blocks = -(-(int(batch.decode_positions.max()) + 1) // self._board.block_tokens)
        return self._graphs.bucket(len(batch.decode_slots), blocks)

    def store(self, packing: Packed, tokens: Tensor) -> None:
        """See `Feed`."""
        there = cast(DevicePacking, packing)
        count = len(tokens)
        self.tokens.index_put_((there.to_slots[:count], there.to_at[:count]), tokens)
