"""How a body's forwards come by their index tensors and tokens, and where what they sample goes."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor

from smpart.errors import UsageError
from smpart.runtime.adapter import ModelAdapter
from smpart.runtime.batch import Batch
from smpart.runtime.board import Board
from smpart.runtime.packing import Packed, Packing


class Feed(Protocol):
    """One lane's, beside its body: on the CPU `HostFeed`, on a device `smpart.runtime.device.feed.DeviceFeed`.

    Attributes:
        adapter: the model.
        tokens: int32[slots, max_len], the tokens of every request, where the model is.
    """

    adapter: ModelAdapter
    tokens: Tensor

    def at(self, place: Any) -> AbstractContextManager[None]:
        """What is run inside goes where the lane is now."""

    def pack(self, batch: Batch) -> Packed:
        """Index tensors of a forward."""

    def whole(self, batch: Batch) -> tuple[Packed, Tensor]:
        """Run a forward without a pause; it, and the logits [m, vocab] of its sampled rows."""

    def forward(self, packing: Packed) -> Tensor:
        """Run a packed forward, which may pause at layers; logits as `whole` gives them."""

    def store(self, packing: Packed, tokens: Tensor) -> None:
        """Put the sampled tokens, int32[m], where later forwards find them."""


class HostFeed:
    """`Feed` of a model in the host's memory, over a board that the engine shares.

    Args:
        memory: KV pages, one tensor a layer, [2, blocks, block_tokens, kv_heads, head_dim], in the model's own type.
        board: where tokens come from and go to, and the block tables.

    Raises:
        UsageError: the memory does not fit the model.
    """

    def __init__(self, adapter: ModelAdapter, memory: Sequence[Tensor], board: Board) -> None:
        check_memory(adapter, memory, board)
        self.adapter = adapter
        self.tokens = torch.from_numpy(board.tokens)
        self._memory = memory
        self._board = board

    def at(self, place: Any) -> AbstractContextManager[None]:
        """The lane's process or thread is where it should be already."""
        return nullcontext()

    def pack(self, batch: Batch) -> Packing:
        """See `Feed`."""
        return Packing(batch, self._board, self._memory[0].dtype)

    def whole(self, batch: Batch) -> tuple[Packing, Tensor]:
        """See `Feed`."""
        packing = self.pack(batch)
        return packing, self.forward(packing)

    def forward(self, packing: Packed) -> Tensor:
        """See `Feed`."""
        return self.adapter.forward(self._memory, packing)

    def store(self, packing: Packed, tokens: Tensor) -> None:
        """See `Feed`. A step run ahead of a request's end may have sampled past the last position."""
        kept = packing.at < self._board.max_len
        self._board.tokens[packing.slots[kept], packing.at[kept]] = tokens.numpy()[kept]


def check_memory(adapter: ModelAdapter, memory: Sequence[Tensor], board: Board) -> None:
    """Raise `UsageError` unless pages and model fit each other."""
    facts = adapter.facts
    wanted = (board.block_tokens, facts.kv_heads, facts.head_dim)
    if len(memory) != facts.layers or any(m.shape[2:] != wanted or m.dtype != facts.dtype for m in memory):
        raise UsageError(
            f"KV memory does not fit the model: it needs {facts.layers} layers of {facts.dtype} pages shaped "
            f"[2, blocks, {', '.join(map(str, wanted))}]"
        )
