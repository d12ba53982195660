"""Models that exist as dimensions only, from their public `config.json`."""

from __future__ import annotations

from typing import Any

from smpart.errors import UsageError
from smpart.partition import ModelShape
from smpart.sim.dimensions import Dimensions, Weights, dimensions

_CONFIGS: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "dtype": "bfloat16",
    },
    "llama-3.1-70b": {
        "model_type": "llama",
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "dtype": "bfloat16",
    },
    "qwen3-32b": {
        "model_type": "qwen3",
        "hidden_size": 5120,
        "intermediate_size": 25600,
        "num_hidden_layers": 64,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "dtype": "bfloat16",
    },
}

_STORED: dict[str, Weights] = {"": "bfloat16", "-fp8": "fp8"}

DIMENSIONS: dict[str, Dimensions] = {
    name + suffix: dimensions(config, weights=weights)
    for name, config in _CONFIGS.items()
    for suffix, weights in _STORED.items()
}
"""By name; ``-fp8`` has 8-bit weights in the layers."""

MODELS: dict[str, ModelShape] = {name: model.shape for name, model in DIMENSIONS.items()}


def built_in(name: str) -> ModelShape:
    """Dimensions of a built-in model. Raises `UsageError` for any other name.

    >>> built_in("llama-3.1-8b").kv_token_bytes // 1024      # KiB a token
    128
    """
    if name not in MODELS:
        raise UsageError(f"no model {name!r} is built in; there are {', '.join(MODELS)}, or give a config.json")
    return MODELS[name]
