"""The dimensions of a model, from its configuration as transformers writes it (`config.json`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from smpart.errors import UnsupportedModel, UsageError
from smpart.partition.shape import ModelShape

_DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}

# Families whose feed-forward part is up and down only; every other one multiplies by a gate as well.
UNGATED = frozenset(
    {
        "bloom",
        "biogpt",
        "codegen",
        "falcon",
        "gpt2",
        "gpt_bigcode",
        "gpt_neo",
        "gpt_neox",
        "gptj",
        "mpt",
        "nemotron",
        "opt",
    }
    | {"persimmon", "phi", "starcoder2", "xglm"}
)


def model_shape(
    config: Mapping[str, Any], *, weight_bytes: int | None = None, kv_bytes: int | None = None
) -> ModelShape:
    """Dimensions of a decoder-only model: dense or mixture of experts, with full or grouped-query attention.

    A mixture of experts multiplies each token with its active experts, and is taken to read all of them from memory
    (a batch of a few dozen tokens touches nearly every one). Norms and biases are left out.

    Args:
        config: parsed `config.json`, or `PretrainedConfig.to_dict()`; of a model of several parts the text part counts.
        weight_bytes, kv_bytes: bytes of one weight and of one K or V element; None takes the config's dtype.

    Raises:
        UnsupportedModel: layers without a plain K and V for each token (latent or linear attention, state spaces).
        UsageError: a dimension is missing or makes no sense, or the dtype is unknown.

    >>> tiny = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128,
    ...         "vocab_size": 100, "dtype": "float32"}
    >>> model_shape(tiny).kv_token_bytes            # K and V, 2 layers, 64 elements, 4 bytes
    1024
    """
    config = {**config, **(config.get("text_config") or {})}
    _refuse_unusual(config)
    hidden = _number(config, "hidden_size", "n_embd", "d_model")
    layers = _number(config, "num_hidden_layers", "n_layer", "n_layers", "num_layers")
    heads = _number(config, "num_attention_heads", "n_head", "n_heads", "num_heads")
    kv_heads = _kv_heads(config, heads)
    head_dim = _number(config, "head_dim", default=hidden // heads)
    vocab = _number(config, "vocab_size")
    attention = hidden * head_dim * (2 * heads + 2 * kv_heads)
    feed_forward = [_feed_forward(config, hidden, layer) for layer in range(layers)]
    active = layers * attention + sum(used for used, _ in feed_forward)
    stored = layers * attention + sum(all_of_it for _, all_of_it in feed_forward)
    head = hidden * vocab
    element = weight_bytes or _dtype_bytes(config)
    return ModelShape(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab=vocab,
        linear_params=active,
        head_params=head,
        weight_bytes=(stored + head) * element,
        kv_bytes=kv_bytes or _dtype_bytes(config),
    )


def _feed_forward(config: Mapping[str, Any], hidden: int, layer: int) -> tuple[int, int]:
    """Weights of one layer's feed-forward part: those a token is multiplied with, and all."""
    matrices = 2 if config.get("model_type") in UNGATED else 3
    experts = _number(config, "num_local_experts", "num_experts", "n_routed_experts", default=0)
    if not experts or not is_sparse(config, layer):
        wide = _number(config, "intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", default=4 * hidden)
        dense = matrices * hidden * wide
        return dense, dense
    width = _number(config, "moe_intermediate_size", "intermediate_size")
    expert = matrices * hidden * width
    shared = matrices * hidden * _number(config, "shared_expert_intermediate_size", default=0)
    shared += expert * _number(config, "n_shared_experts", default=0)
    router = hidden * experts
    active = _number(config, "num_experts_per_tok", "top_k", "moe_topk")
    return active * expert + shared + router, experts * expert + shared + router


def is_sparse(config: Mapping[str, Any], layer: int) -> bool:
    """Whether a layer of a mixture of experts has experts."""
    if layer in (config.get("mlp_only_layers") or ()) or layer < (config.get("first_k_dense_replace") or 0):
        return False
    return (layer + 1) % (config.get("decoder_sparse_step") or 1) == 0


def _kv_heads(config: Mapping[str, Any], heads: int) -> int:
    if config.get("multi_query") and not config.get("new_decoder_architecture"):
        return 1
    return _number(config, "num_key_value_heads", "num_kv_heads", default=heads)


def _refuse_unusual(config: Mapping[str, Any]) -> None:
    family = config.get("model_type", "model")
    if config.get("kv_lora_rank"):
        raise UnsupportedModel(
            f"{family}: latent attention stores no K and V for each head; this model has no shape here"
        )
    kinds = set(config.get("layer_types") or ()) - {"full_attention", "sliding_attention", "chunked_attention"}
    if kinds or config.get("ssm_cfg") or "state_size" in config:
        raise UnsupportedModel(f"{family}: {', '.join(sorted(kinds)) or 'state-space'} layers have no K and V a token")


def _number(config: Mapping[str, Any], *names: str, default: int | None = None) -> int:
    """The first of `names` that is set."""
    value = next((config[name] for name in names if config.get(name) is not None), default)
    if value is None:
        raise UsageError(f"model config has no {names[0]}: is this the config.json of a decoder-only language model?")
    if isinstance(value, bool) or not isinstance(value, int) or value < 0 or (value == 0 and default is None):
        raise UsageError(f"model config: {names[0]}={value!r} must be a whole number of at least 1")
    return value


def _dtype_bytes(config: Mapping[str, Any]) -> int:
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    if dtype not in _DTYPE_BYTES:
        raise UsageError(f"model config: dtype {dtype!r} is unknown; there are {', '.join(_DTYPE_BYTES)}")
    return _DTYPE_BYTES[dtype]
