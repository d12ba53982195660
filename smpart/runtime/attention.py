"""Attention over paged KV memory, called by unmodified transformers models through their attention interface.

One forward is packed: decode rows and prefill chunks lie one after the other in a single row of tokens. A model's
attention layers each call `PagedCache.update` (which writes the new keys and values to their pages) and then the
registered attention function (which reads the pages of every sequence). Both happen between two decoder layers, so
forwards that pause at layers can interleave freely.

Which forward an attention call belongs to is held in a context variable: a paused forward lives in a greenlet, each
greenlet has its own context, and code outside a paged forward sees none and gets the model's original attention.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from smpart.errors import UnsupportedModel
from smpart.runtime.packing import Packed

_NAMES = {"sdpa": "smpart", "eager": "smpart_eager"}
_UNSUPPORTED = {
    "softcap": "it caps attention scores (soft-capping)",
    "s_aux": "it uses attention sinks",
    "position_bias": "it adds a position bias to attention scores",
}

current: ContextVar[PagedCache | None] = ContextVar("current", default=None)
"""The paged forward that runs in this context."""


@dataclass(frozen=True, slots=True)
class WindowMask:
    """Stands in for an attention mask while a model's windows are being learned.

    Attributes:
        allowed: transformers' description of the mask, see `window_of`.
    """

    allowed: Callable[..., Any]


class PagedCache:
    """What a transformers model takes for its KV cache during one packed forward.

    Args:
        memory: one tensor a layer, [2, blocks, block_tokens, kv_heads, head_dim] (keys, then values).
        packing: the forward: where each token goes and what it attends to.
        windows: sliding window of each layer; None learns them from the masks the model asks for, into `learned`.
        horizon: longest sequence to learn them for.

    Attributes:
        queries: number of query heads and factor of the scores, of every layer seen while learning.
    """

    is_compileable = False
    is_sliding = (False,)

    def __init__(
        self, memory: Sequence[Tensor], packing: Packed, windows: Sequence[int | None] | None, horizon: int = 0
    ) -> None:
        self.memory = memory
        self.packing = packing
        self.windows = windows
        self.horizon = horizon
        self.learned: dict[int, int | None] = {}
        self.queries: set[tuple[int, float]] = set()
        self.order: list[int] = []
        self._pending: int | None = None

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens before this forward: none, as positions are always given explicitly."""
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Length and offset of the keys that a mask would cover."""
        return query_length, 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Offset of the queries that a mask would cover."""
        return 0

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write new keys and values, each [1, kv_heads, tokens, head_dim], to their pages; return them as they are."""
        self.packing.write(self.memory[layer_idx], key, value)
        self._pending = layer_idx
        self.order.append(layer_idx)
        return key, value

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Any, scale: float | None) -> Tensor:
        """Attention of every packed token to its own sequence.

        Args:
            query: [1, heads, tokens, head_dim].
            key, value: what `update` was given for this layer.

        Returns:
            [1, tokens, heads, head_dim].
        """
        layer, self._pending = self._pending, None
        if layer is None:
            raise UnsupportedModel("an attention layer stores no keys and values of its own (shared or uncached KV)")
        if self.windows is None:
            self.queries.add((query.shape[1], scale if scale is not None else query.shape[3] ** -0.5))
        window = self.windows[layer] if self.windows is not None else self._learn(layer, mask)
        return self.packing.attend(self.memory[layer], query, key, value, window, scale)[None]

    def _learn(self, layer: int, mask: Any) -> int | None:
        if mask is not None and not isinstance(mask, WindowMask):
            raise UnsupportedModel("it builds its attention masks by itself, outside transformers' mask interface")
        self.learned[layer] = window_of(mask.allowed, self.horizon) if mask is not None else None
        return self.learned[layer]


def _attention(original: str) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """The attention function for models whose own implementation is `original`."""

    def attention(
        module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        cache = current.get()
        if cache is None:
            return _own_attention(original, module)(module, query, key, value, attention_mask, **kwargs)
        for name, reason in _UNSUPPORTED.items():
            if kwargs.get(name) is not None:
                raise UnsupportedModel(reason)
        if kwargs.get("is_causal") is False or not getattr(module, "is_causal", True):
            raise UnsupportedModel("an attention layer is not causal")
        return cache.attend(query, key, value, attention_mask, kwargs.get("scaling")), None

    return attention


def _own_attention(original: str, module: torch.nn.Module) -> Callable[..., tuple[Tensor, Tensor | None]]:
    if original == "eager":  # each modelling file has its own, in no registry
        function: Callable[..., tuple[Tensor, Tensor | None]] = vars(sys.modules[type(module).__module__])[
            "eager_attention_forward"
        ]
        return function
    return ALL_ATTENTION_FUNCTIONS[original]  # type: ignore[no-any-return]


def _mask(original: str) -> Callable[..., Any]:
    """The mask function for models whose own implementation is `original`."""

    def mask(*args: Any, **kwargs: Any) -> Any:
        cache = current.get()
        if cache is None:
            return ALL_MASK_ATTENTION_FUNCTIONS[original](*args, **kwargs)
        if cache.windows is not None:
            return None
        return WindowMask(kwargs["mask_function"])

    return mask


def window_of(allowed: Callable[..., Any], horizon: int) -> int | None:
    """The sliding window that a mask function of transformers describes; None if it is plainly causal.

    Args:
        allowed: ``(batch, head, query, key) -> bool``, on index tensors.
        horizon: longest sequence, in tokens.

    Raises:
        UnsupportedModel: the pattern is neither causal nor a sliding window.
    """
    keys, zero = torch.arange(horizon), torch.tensor(0)
    queries = sorted({horizon - 1, horizon // 2, horizon // 3 + 1, 0})
    lengths = {}
    for query in queries:
        row = torch.as_tensor(allowed(zero, zero, torch.tensor(query), keys)).broadcast_to(keys.shape)
        length = int(row.sum())
        if length == 0 or not bool(row[query + 1 - length : query + 1].all()):
            raise UnsupportedModel("its attention mask is neither causal nor a sliding window")
        lengths[query] = length
    window = max(lengths.values())
    if any(length != min(window, query + 1) for query, length in lengths.items()):
        raise UnsupportedModel("its attention mask is neither causal nor a sliding window (chunked attention?)")
    return None if window >= horizon else window


def register(original: str) -> str:
    """Register paged attention for models that run `original` (``sdpa`` or ``eager``); the name to set on the model."""
    name = _NAMES[original]
    if name not in ALL_ATTENTION_FUNCTIONS:
        AttentionInterface.register(name, _attention(original))
        AttentionMaskInterface.register(name, _mask(original))
    return name


def original_of(name: str) -> str | None:
    """The implementation behind `name`: ``sdpa`` or ``eager``, also for a model already wrapped; None: another one."""
    return next((original for original, ours in _NAMES.items() if name in (original, ours)), None)
