"""Dimensions of the models that others measured, whole or as one rank of tensor parallelism holds them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from smpart.errors import UsageError
from smpart.partition import ModelShape, model_shape

_LLAMA_31 = {"model_type": "llama", "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256}
_QWEN_3 = {"model_type": "qwen3", "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936}


def _config(family: dict[str, Any], layers: int, hidden: int, heads: int, wide: int) -> dict[str, Any]:
    sizes = {"num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads}
    return {**family, **sizes, "intermediate_size": wide, "dtype": "bfloat16"}


CONFIGS: dict[str, dict[str, Any]] = {
    "llama-3.2-3b": _config(_LLAMA_31, 28, 3072, 24, 8192),
    "llama-3.1-8b": _config(_LLAMA_31, 32, 4096, 32, 14336),
    "llama-3.1-70b": _config(_LLAMA_31, 80, 8192, 64, 28672),
    "qwen3-8b": _config(_QWEN_3, 36, 4096, 32, 12288),
}
"""By name: as in each model's published ``config.json``."""


def rank_of(name: str, ranks: int = 1, kv_bytes: int = 2) -> ModelShape:
    """Dimensions of what one of `ranks` tensor-parallel ranks computes, 16-bit weights.

    >>> rank_of("llama-3.1-70b", 8).kv_heads
    1
    """
    whole = model_shape(CONFIGS[name], kv_bytes=kv_bytes)
    if whole.kv_heads % ranks:
        raise UsageError(f"{name} has {whole.kv_heads} KV heads: they cannot be shared among {ranks} ranks")
    return replace(
        whole,
        heads=whole.heads // ranks,
        kv_heads=whole.kv_heads // ranks,
        linear_params=whole.linear_params // ranks,
        head_params=whole.head_params // ranks,
        weight_bytes=whole.weight_bytes // ranks,
    )


def attention_only(model: ModelShape, layers: int = 1) -> ModelShape:
    """The attention of `layers` layers, without weights."""
    return replace(model, layers=layers, linear_params=0, head_params=0, weight_bytes=0)


def layers_only(model: ModelShape) -> ModelShape:
    """All layers, without the language-model head."""
    return replace(model, head_params=0, weight_bytes=2 * model.linear_params)


def linears_only(model: ModelShape) -> ModelShape:
    """The matmuls of all layers, without attention: no heads, no KV."""
    return replace(layers_only(model), heads=0, kv_heads=0, head_dim=0)
