"""Model dimensions against the published parameter counts, and against transformers' own models."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from smpart.errors import UnsupportedModel, UsageError
from smpart.partition import ModelShape, Shape, model_shape

TINY = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 96, "vocab_size": 200}
SMALL = TINY | {"num_key_value_heads": 2}

FAMILIES = [
    ("llama", SMALL),
    ("mistral", SMALL),
    ("qwen2", SMALL),
    ("qwen3", SMALL | {"head_dim": 32}),
    ("gemma", SMALL | {"head_dim": 16}),
    ("gpt2", {"n_embd": 64, "n_layer": 3, "n_head": 4, "vocab_size": 200}),
    ("gpt_neox", TINY),
    ("phi", TINY),
    ("starcoder2", SMALL),
    ("opt", TINY | {"ffn_dim": 96, "word_embed_proj_dim": 64}),
    ("mixtral", SMALL | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    ("qwen2_moe", SMALL | {"num_experts": 4, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 48}),
    ("qwen3_moe", SMALL | {"num_experts": 8, "moe_intermediate_size": 32, "num_experts_per_tok": 2, "head_dim": 16}),
    ("qwen3_moe", SMALL | {"num_experts": 8, "moe_intermediate_size": 32, "mlp_only_layers": [0], "head_dim": 16}),
]


@pytest.mark.parametrize(("family", "fields"), FAMILIES, ids=[f"{i}-{name}" for i, (name, _) in enumerate(FAMILIES)])
def test_weights_are_those_of_transformers(family, fields):
    """All weights a forward reads: the matrices of the model's own decoder layers and of its head."""
    config = AutoConfig.for_model(family, **fields)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    layers = next(module for module in model.base_model.modules() if isinstance(module, torch.nn.ModuleList))
    matrices = sum(weight.numel() for weight in layers.parameters() if weight.dim() >= 2)
    head = model.get_output_embeddings().weight.numel()
    shape = model_shape(config.to_dict(), weight_bytes=1)
    # A shared expert's own gate (one row a layer) is left out as the norms are.
    gates = sum(w.numel() for name, w in layers.named_parameters() if "shared_expert_gate" in name)
    assert shape.weight_bytes == matrices - gates + head
    assert shape.head_params == head
    assert shape.layers == len(layers)


@pytest.mark.parametrize(("family", "fields"), FAMILIES[:3])
def test_a_dense_model_multiplies_with_all_its_weights(family, fields):
    shape = model_shape(AutoConfig.for_model(family, **fields).to_dict(), weight_bytes=2)
    assert shape.weight_bytes == 2 * (shape.linear_params + shape.head_params)


def test_a_mixture_multiplies_with_its_active_experts_only():
    """Mixtral-8x7B: 46.7e9 parameters, 12.9e9 of them active (Jiang et al. 2024)."""
    config = {
        "model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000, "num_local_experts": 8,
        "num_experts_per_tok": 2, "torch_dtype": "bfloat16",
    }  # fmt: skip
    shape, embedding = model_shape(config), 32000 * 4096
    assert (shape.linear_params + shape.head_params + embedding) / 1e9 == pytest.approx(12.9, abs=0.05)
    assert (shape.weight_bytes / 2 + embedding) / 1e9 == pytest.approx(46.7, abs=0.05)


def test_flops_agree_with_a_counting_forward():
    """torch's own flop counter over a real forward, against 2 per multiply-add of `ModelShape.flops`."""
    from torch.utils.flop_counter import FlopCounterMode

    config = AutoConfig.for_model("llama", **SMALL, attn_implementation="eager")
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.ones(1, 24, dtype=torch.long), logits_to_keep=1)
    shape = Shape.prefill([(24, 0)])
    # An eager forward computes the masked half of the scores too.
    masked = 4.0 * 3 * 4 * 16 * (24 * 24 - shape.prefill_pairs)
    assert counter.get_total_flops() == pytest.approx(model_shape(config.to_dict()).flops(shape) + masked, rel=2e-3)


@pytest.mark.parametrize(("dtype", "size"), [("float32", 4), ("torch.bfloat16", 2), (torch.float16, 2), (None, 2)])
def test_dtype(dtype, size):
    assert model_shape(TINY | {"dtype": dtype}).kv_bytes == size
    assert model_shape(TINY | {"dtype": dtype}, kv_bytes=1).kv_token_bytes == 2 * 3 * 64


def test_the_text_part_of_a_larger_model_counts():
    assert model_shape({"model_type": "llava", "text_config": TINY}) == model_shape(TINY)


def test_multi_query_has_one_kv_head():
    assert model_shape(TINY | {"model_type": "falcon", "multi_query": True}).kv_heads == 1


@pytest.mark.parametrize(
    "extra", [{"kv_lora_rank": 512}, {"layer_types": ["linear_attention", "full_attention"]}, {"state_size": 16}]
)
def test_models_without_plain_kv_are_refused(extra):
    with pytest.raises(UnsupportedModel):
        model_shape(TINY | extra)


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        ({}, "hidden_size"),
        (TINY | {"hidden_size": "64"}, "hidden_size='64'"),
        (TINY | {"num_attention_heads": 0}, "num_attention_heads"),
        (TINY | {"vocab_size": -1}, "vocab_size"),
        (TINY | {"dtype": "int3"}, "int3"),
        (TINY | {"num_experts": 4, "moe_intermediate_size": 8}, "num_experts_per_tok"),
    ],
)
def test_broken_configs(broken, says):
    with pytest.raises(UsageError, match=says):
        model_shape(broken)


def test_it_is_a_model_shape():
    assert isinstance(model_shape(TINY), ModelShape)
