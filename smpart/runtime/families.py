"""Tiny models of many families with seeded random weights: for tests, trials and machines without a network."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from smpart.errors import UsageError

_COMMON: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_HEADS_OF_16: dict[str, Any] = {**_COMMON, "head_dim": 16}
_MULTI_HEAD: dict[str, Any] = {name: value for name, value in _COMMON.items() if name != "num_key_value_heads"}
_GPT: dict[str, Any] = {
    "vocab_size": 512,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_WINDOWS: dict[str, Any] = {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"]}
_GEMMA: dict[str, Any] = {**_HEADS_OF_16, "query_pre_attn_scalar": 16, **_WINDOWS}
_EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LATENT: dict[str, Any] = {
    **_COMMON,
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": _COMMON,
    "qwen2": _COMMON,
    "qwen2_moe": {**_COMMON, **_EXPERTS, "shared_expert_intermediate_size": 64},
    "qwen3": _HEADS_OF_16,
    "qwen3_moe": {**_HEADS_OF_16, **_EXPERTS},
    "mistral": {**_HEADS_OF_16, "sliding_window": 24},
    "ministral": {**_HEADS_OF_16, **_WINDOWS},
    "mixtral": {**_COMMON, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "gemma": _HEADS_OF_16,
    "gemma3_text": _GEMMA,
    "phi": _COMMON,
    "phi3": {**_COMMON, "sliding_window": 24},
    "phimoe": {**_COMMON, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "gpt2": _GPT,
    "gptj": {**_GPT, "rotary_dim": 8},
    "gpt_neox": _MULTI_HEAD,
    "gpt_bigcode": {**_GPT, "multi_query": True},
    "opt": {**_MULTI_HEAD, "ffn_dim": 128, "word_embed_proj_dim": 64},
    "olmo": _COMMON,
    "olmo2": _COMMON,
    "olmo3": {**_COMMON, **_WINDOWS},
    "olmoe": {**_COMMON, "num_experts": 4, "num_experts_per_tok": 2},
    "stablelm": _COMMON,
    "starcoder2": {**_COMMON, "sliding_window": 24},
    "glm": _HEADS_OF_16,
    "glm4": _HEADS_OF_16,
    "granite": {**_COMMON, "logits_scaling": 4.0, "attention_multiplier": 0.2, "residual_multiplier": 0.5},
    "granitemoe": {**_COMMON, "num_local_experts": 4, "num_experts_per_tok": 2},
    "cohere": {**_COMMON, "logit_scale": 0.25},
    "cohere2": {**_HEADS_OF_16, "logit_scale": 0.25, **_WINDOWS},
    "smollm3": {**_COMMON, "no_rope_layers": [1, 0]},
    "helium": _HEADS_OF_16,
    "nemotron": _COMMON,
    "seed_oss": _HEADS_OF_16,
    "ernie4_5": _HEADS_OF_16,
    "exaone4": {**_HEADS_OF_16, **_WINDOWS},
    "hunyuan_v1_dense": _HEADS_OF_16,
    "gemma2": {**_GEMMA, "attn_logit_softcapping": 50.0},
    "gpt_oss": {**_HEADS_OF_16, **_WINDOWS, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_next": {**_HEADS_OF_16, **_EXPERTS, "layer_types": ["linear_attention", "full_attention"]},
    "deepseek_v3": _LATENT,
    "falcon": {**_MULTI_HEAD, "alibi": False},
    "bloom": {name: value for name, value in _GPT.items() if name != "n_positions"},
    "mpt": {"vocab_size": 512, "d_model": 64, "n_layers": 2, "n_heads": 4, "max_seq_len": 2048},
    "mamba": {"vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 2, "state_size": 8},
    "bart": {
        "vocab_size": 512,
        "d_model": 64,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "max_position_embeddings": 128,
    },
}
"""Configurations by transformers' model type; those that cannot be served are here to show the reason."""

_SEED = 0
_STD = 0.15
"""Spread of the weights: large enough for outputs to vary from prompt to prompt."""


def family_config(family: str) -> PreTrainedConfig:
    """Configuration of the tiny model of one family. Raises `UsageError` for a family not listed."""
    if family not in FAMILIES:
        raise UsageError(f"random:{family}: no such family; there are {', '.join(sorted(FAMILIES))}")
    try:
        return AutoConfig.for_model(family, **FAMILIES[family])
    except ValueError as error:
        raise UsageError(f"random:{family}: this version of transformers has no such model") from error


def random_model(family: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A tiny model of one family. Equal weights at every call, whatever the state of torch's generator."""
    config = family_config(family)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()  # type: ignore[no-untyped-call]
    generator = torch.Generator().manual_seed(_SEED)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.empty(parameter.shape).normal_(std=_STD, generator=generator))
    assert isinstance(model, PreTrainedModel)
    return model
