"""Law 3 in bf16: each token is plain `forward`'s likeliest on our own output, or as near to it as its noise allows."""

from __future__ import annotations

import pytest
import torch

import smpart
from smpart.runtime.models import load_model

PROMPTS = ("The capital of France is", "Once upon a time there was a small", "Water boils at a temperature of")
NEW = 16


@pytest.mark.slow
@pytest.mark.smollm2
def test_bf16_tokens_are_those_of_plain_forward_within_its_noise(record_property) -> None:
    model, tokenizer = load_model("smollm2", dtype="bfloat16")
    model.generation_config.eos_token_id = None
    prompts = [tokenizer.encode(p) for p in PROMPTS]
    kv = smpart.KVConfig(max_len=128, memory_bytes=1 << 28)
    with smpart.wrap(model, tokenizer, kv=kv, policy="chunked:16") as engine:
        outputs = engine.generate(prompts, smpart.SamplingParams(max_tokens=NEW, ignore_eos=True))
    flips = 0
    for prompt, output in zip(prompts, outputs, strict=True):
        ids = torch.tensor([[*prompt, *output.token_ids]])
        with torch.inference_mode():
            alone = model(ids).logits[0].float()
            together = model(ids.repeat(3, 1)).logits[1].float()
            greedy = model.generate(torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False)
        flips += greedy[0, len(prompt) :].tolist() != list(output.token_ids)
        at = slice(len(prompt) - 1, len(prompt) - 1 + NEW)
        noise = float((alone[at] - together[at]).abs().max())
        chosen = alone[at].gather(1, torch.tensor(output.token_ids)[:, None])[:, 0]
        short = float((alone[at].max(dim=1).values - chosen).max())
        assert short <= 2 * noise or short == 0.0, f"{short:.3f} below the likeliest; noise {noise:.3f}"
    record_property("flip_rate", flips / len(prompts))
    print(f"bf16: {flips} of {len(prompts)} answers differ from generate")
