"""Tries without a device whether a CUDA graph can hold a model's decode step.

One step runs on torch's ``meta`` device, where tensors have shapes but no values: reading a value, a shape that
depends on values, and a tensor that does not move with the model all show, and nothing is computed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn import Module

from smpart.runtime.attention import PagedCache
from smpart.runtime.batch import Batch
from smpart.runtime.board import Board
from smpart.runtime.device.attention import AttentionShape, Bucket, Scratch
from smpart.runtime.device.gather import GatherAttention
from smpart.runtime.device.layout import Spare, lay_out
from smpart.runtime.device.packing import DevicePacking
from smpart.runtime.host_reads import host_reads
from smpart.runtime.pause import PausableForward

if TYPE_CHECKING:
    from smpart.runtime.facts import ModelFacts

_META = torch.device("meta")
_ROWS, _BLOCK = 2, 16


def why_uncapturable(
    model: Module, layers: list[Module], facts: ModelFacts, run: Callable[[PagedCache], Tensor]
) -> str | None:
    """What a decode step does that a CUDA graph cannot hold, and in which line; None: nothing was found.

    Of layers that are alike only the first is sure to run, and the head only if no two are.

    Args:
        layers: its decoder layers, which pause.
        run: runs a packed forward of the model.
    """
    found: list[str] = []
    kinds = [(repr(layer), window) for layer, window in zip(layers, facts.windows, strict=True)]
    step = _Step(model, run, 1 + max(kinds.index(kind) for kind in kinds))
    try:
        state = {
            name: torch.empty_like(tensor, device=_META)
            for name, tensor in [*step.named_parameters(), *step.named_buffers()]
        }
        with host_reads(found.append):
            functional_call(step, state, (_cache(facts),))
    except Exception:
        # On CUDA it may work all the same: where nothing else was found, the attempt to capture it tells.
        pass
    return found[0] if found else None


class _Step(Module):
    """The first layers of one forward, as a module whose tensors can be swapped for a call."""

    def __init__(self, model: Module, run: Callable[[PagedCache], Tensor], layers: int) -> None:
        super().__init__()
        self.model = model
        self._run = run
        self._layers = layers

    def forward(self, cache: PagedCache) -> None:
        forward = PausableForward(lambda: self._run(cache))
        forward.advance(self._layers)
        forward.abandon()


def _cache(facts: ModelFacts) -> PagedCache:
    """A decode step of two rows, a block each."""
    board = Board.over(bytearray(Board.size(_ROWS, _BLOCK, _BLOCK)), _ROWS, _BLOCK, _BLOCK)
    tokens = torch.empty((_ROWS + 1, _BLOCK + 1), dtype=torch.int32, device=_META)
    bucket = Bucket(_ROWS, 1)
    batch = Batch(np.arange(_ROWS, dtype=np.int32), np.full(_ROWS, 5, np.int32))
    shape = AttentionShape(facts.heads, facts.kv_heads, facts.head_dim, _BLOCK, facts.dtype, facts.scale or 1.0)
    attention = GatherAttention(shape, Scratch(_META), units=1, bucket=bucket)
    pages: Any = (2, _ROWS + 1, _BLOCK, facts.kv_heads, facts.head_dim)
    memory = [torch.empty(pages, dtype=facts.dtype, device=_META) for _ in range(facts.layers)]
    layout = lay_out(batch, board, Spare(_ROWS, _ROWS), bucket)
    return PagedCache(memory, DevicePacking(layout, tokens, attention), facts.windows)
