"""Tries without a device whether a CUDA graph can hold a model's decode step.

One step runs on torch's ``meta`` device, where tensors have shapes but no values: reading a value, a shape that
depends on values, and a tensor that does not move with the model all show, and nothing is computed.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module, Parameter

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
        run: runs a packed forward of the model; a method of what holds the model.
    """
    found: list[str] = []
    kinds = [(repr(layer), window) for layer, window in zip(layers, facts.windows, strict=True)]
    enough = 1 + max(kinds.index(kind) for kind in kinds)
    try:
        # A copy: forwards keep tensors in attributes, which here are without values.
        run = copy.deepcopy(run, _without_values(model))
        for _ in range(2):  # a step is captured after one has run as it is
            found.clear()
            with host_reads(found.append):
                forward = PausableForward(functools.partial(run, _cache(facts)))
                forward.advance(enough)
                forward.abandon()
    except Exception:
        # On CUDA it may work all the same: where nothing else was found, the attempt to capture it tells.
        pass
    return found[0] if found else None


def _without_values(model: Module) -> dict[int, Any]:
    """For `copy.deepcopy`: what stands for each of the model's parameters and buffers."""
    parameters = {id(p): Parameter(torch.empty_like(p, device=_META), requires_grad=False) for p in model.parameters()}
    return {**parameters, **{id(b): torch.empty_like(b, device=_META) for b in model.buffers()}}


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
