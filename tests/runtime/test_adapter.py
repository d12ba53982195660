"""The adapter: what it finds out, what it leaves alone, and copies of it in other processes."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM, T5Config, T5ForConditionalGeneration

from smpart.errors import UnsupportedModel, UsageError
from smpart.runtime.adapter import ModelAdapter, model_shape
from smpart.runtime.facts import max_positions
from smpart.runtime.families import family_config, random_model


def test_facts_of_a_model_with_windows():
    facts = ModelAdapter(random_model("gemma3_text")).facts
    assert (facts.layers, facts.kv_heads, facts.head_dim, facts.vocab) == (2, 2, 16, 512)
    assert facts.windows == (24, None)
    assert facts.max_positions == 2048
    assert facts.dtype == torch.float32


def test_a_copy_in_another_process_needs_no_trial(rig, greedy):
    model = random_model("llama")
    expected = greedy(model, range(3, 40), 5)
    adapter = ModelAdapter(model)
    copy, facts = pickle.loads(pickle.dumps((adapter.model, adapter.facts)))
    serving = rig(ModelAdapter(copy, facts))
    serving.add(range(3, 40))
    assert serving.serve(0, 5) == expected
    assert greedy(copy, range(3, 40), 5) == expected


def test_two_adapters_of_one_model_pause_once_a_layer():
    model = random_model("llama")
    ModelAdapter(model)
    adapter = ModelAdapter(model)
    assert [len(layer._forward_pre_hooks) for layer in adapter.layers] == [1, 1]


def test_eager_models_keep_their_own_attention():
    model = random_model("qwen2")
    model.set_attn_implementation("eager")
    ids = torch.arange(3, 20)[None]
    with torch.inference_mode():
        before = model(ids, output_attentions=True)
        ModelAdapter(model)
        after = model(ids, output_attentions=True)
    assert torch.equal(before.logits, after.logits)
    assert torch.equal(before.attentions[0], after.attentions[0])


def test_another_attention_implementation_is_refused():
    model = random_model("llama")
    model.set_attn_implementation("flex_attention")
    with pytest.raises(UnsupportedModel, match="attn_implementation='sdpa'"):
        ModelAdapter(model)


def test_a_model_in_training_mode_is_served_without_dropout_and_given_back():
    config = family_config("gpt2")
    config.attn_pdrop = config.resid_pdrop = config.embd_pdrop = 0.5
    model = AutoModelForCausalLM.from_config(config).train()
    adapter = ModelAdapter(model)
    assert not model.training
    adapter.detach()
    assert model.training


def test_an_encoder_decoder_is_refused():
    config = T5Config(vocab_size=64, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    with pytest.raises(UnsupportedModel, match="encoder-decoder"):
        ModelAdapter(T5ForConditionalGeneration(config))


def test_whatever_changes_the_logits_only_on_the_paged_path_is_refused(monkeypatch):
    model = random_model("llama")
    own = model.model.forward

    def positions_ignored(*args, position_ids=None, **kwargs):
        return own(*args, **kwargs)

    monkeypatch.setattr(model.model, "forward", positions_ignored)
    with pytest.raises(UnsupportedModel, match="logits differ"):
        ModelAdapter(model)


def test_broken_weights_are_refused():
    model = random_model("llama")
    with torch.no_grad():
        model.lm_head.weight[0, 0] = torch.nan
    with pytest.raises(UnsupportedModel, match="not finite"):
        ModelAdapter(model)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_positions_that_stretch_with_the_longest_neighbour_end_where_stretching_begins(kind):
    config = family_config("phi3" if kind == "longrope" else "llama")
    config.rope_parameters = {
        "rope_type": kind,
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 512,
    }
    if kind == "longrope":
        config.original_max_position_embeddings = 512
        config.rope_parameters |= {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    model = AutoModelForCausalLM.from_config(config)
    assert max_positions(model) == 512
    assert ModelAdapter(model).facts.max_positions == 512


def test_shape_counts_weights_exactly():
    with torch.device("meta"):
        model = LlamaForCausalLM(family_config("llama"))
    shape = model_shape(model)
    attention, feed_forward, norms = 64 * 64 * 2 + 64 * 32 * 2, 3 * 64 * 128, 2 * 64
    assert shape.linear_params == 2 * (attention + feed_forward)
    assert shape.head_params == 512 * 64
    assert shape.weight_bytes == 4 * (2 * (attention + feed_forward + norms) + 512 * 64)
    assert (shape.hidden, shape.heads, shape.kv_heads, shape.head_dim, shape.vocab) == (64, 4, 2, 16, 512)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "olmoe", "granitemoe", "phimoe"])
def test_shape_counts_active_experts_only(family):
    config = family_config(family)
    dense = family_config(family)
    dense.num_experts_per_tok = 4  # all of them
    with torch.device("meta"):
        half, full = (model_shape(AutoModelForCausalLM.from_config(c)) for c in (config, dense))
    expert = 3 * 64 * (32 if family == "qwen3_moe" else 128)
    assert full.linear_params - half.linear_params == 2 * 2 * expert
    assert replace(half, linear_params=0) == replace(full, linear_params=0)


def test_shape_of_what_stores_no_keys_and_values_is_refused():
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(family_config("mamba"))
    with pytest.raises(UsageError):
        model_shape(model)
