"""Every family against transformers' own `generate`: same tokens under random schedules, and refusals with a reason."""

from __future__ import annotations

import random

import pytest
import torch

from smpart.errors import UnsupportedModel
from smpart.runtime.adapter import ModelAdapter, model_shape
from smpart.runtime.families import FAMILIES, random_model

REFUSED = {
    "gemma2": "soft-capping",
    "gpt_oss": "sinks",
    "qwen3_next": "linear_attention",
    "deepseek_v3": "latent attention",
    "falcon": "attention interface",
    "bloom": "attention interface",
    "mpt": "attention interface",
    "mamba": "linear_attention",
    "bart": "does not reproduce",
}
COMMON = {"llama", "qwen3_moe", "gemma3_text", "phi3", "gpt2", "opt", "cohere2"}
SERVED = [
    pytest.param(family, marks=[] if family in COMMON else pytest.mark.slow)
    for family in sorted(set(FAMILIES) - set(REFUSED))
]
TOKENS = 12


def prompts(seed: int) -> list[list[int]]:
    """Lengths on both sides of a block and of the families' sliding window of 24."""
    draw = random.Random(seed)
    return [[draw.randrange(3, 500) for _ in range(n)] for n in (1, 37, 5, 64, 16, 25)]


@pytest.mark.parametrize("family", SERVED)
def test_tokens_equal_generate(family, rig, greedy):
    model = random_model(family)
    expected = [greedy(model, prompt, TOKENS) for prompt in prompts(7)]
    adapter = ModelAdapter(model)
    serving = rig(adapter, seed=len(family))
    for prompt in prompts(7):
        serving.add(prompt)
    assert serving.serve_all(TOKENS) == expected
    assert len({token for answer in expected for token in answer}) > 4  # outputs vary, so equality means something


@pytest.mark.parametrize("family", SERVED)
def test_facts_and_shape_agree(family):
    model = random_model(family)
    facts, shape = ModelAdapter(model).facts, model_shape(model)
    assert (facts.layers, facts.kv_heads, facts.head_dim, facts.vocab) == (
        shape.layers,
        shape.kv_heads,
        shape.head_dim,
        shape.vocab,
    )


@pytest.mark.parametrize("family", SERVED)
def test_generate_is_unchanged_by_wrapping(family):
    model = random_model(family)
    ids = torch.tensor([[0, 0, 5, 6, 7], [3, 4, 5, 6, 7]])
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])

    def logits() -> torch.Tensor:
        options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
        out = model.generate(ids, attention_mask=mask, output_logits=True, return_dict_in_generate=True, **options)
        return torch.stack(out.logits)

    before = logits()
    adapter = ModelAdapter(model)
    assert torch.equal(logits(), before)
    adapter.detach()
    assert torch.equal(logits(), before)
    assert model.config._attn_implementation == "sdpa"
    assert not any(layer._forward_pre_hooks for layer in adapter.layers)


@pytest.mark.parametrize("family", sorted(REFUSED))
def test_refused_with_a_reason_and_left_as_it_was(family):
    model = random_model(family)
    implementation = model.config._attn_implementation
    with pytest.raises(UnsupportedModel, match=REFUSED[family]) as refusal:
        ModelAdapter(model)
    assert "\n" not in str(refusal.value)
    assert model.config._attn_implementation == implementation
