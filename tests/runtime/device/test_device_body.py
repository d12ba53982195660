"""The body on a device (torch's CPU behind everything but CUDA itself): same tokens, and steps from captured graphs."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from device_rig import CpuQueue, device_feed, place

from smpart.partition import Split
from smpart.runtime.adapter import ModelAdapter
from smpart.runtime.batch import Batch, Chunk, Sampler, Segment
from smpart.runtime.body import ModelBody
from smpart.runtime.families import FAMILIES, random_model
from smpart.runtime.sampling import SamplingParams

REFUSED = {"gemma2", "gpt_oss", "qwen3_next", "deepseek_v3", "falcon", "bloom", "mpt", "mamba", "bart"}
COMMON = {"llama", "qwen3_moe", "gemma3_text", "gpt2"}
SERVED = [
    pytest.param(family, marks=[] if family in COMMON else pytest.mark.slow)
    for family in sorted(set(FAMILIES) - REFUSED)
]
TOKENS = 12


def prompts(seed: int) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(3, 500) for _ in range(n)] for n in (1, 37, 5, 64, 16, 25)]


@pytest.mark.parametrize("family", SERVED)
def test_tokens_equal_generate(family, rig, greedy):
    model = random_model(family)
    expected = [greedy(model, prompt, TOKENS) for prompt in prompts(7)]
    serving = rig(ModelAdapter(model), seed=len(family), device=True)
    for prompt in prompts(7):
        serving.add(prompt)
    assert serving.serve_all(TOKENS) == expected
    assert serving.queue.captured and serving.queue.replays > 5


@pytest.fixture(scope="module")
def llama():
    return ModelAdapter(random_model("llama"))


def test_sampled_answers_are_those_of_the_host(llama, rig):
    params = [
        SamplingParams(temperature=0.9, top_p=0.8),
        SamplingParams(temperature=1.2, top_k=40, repetition_penalty=1.3),
        SamplingParams(presence_penalty=1.0, frequency_penalty=0.5, logprobs=3),
        SamplingParams(temperature=0.7, min_p=0.05, presence_penalty=-1.0),
    ]
    answers = []
    for device in (False, True):
        serving = rig(llama, device=device)
        for seed, (prompt, each) in enumerate(zip(prompts(3), params, strict=False)):
            serving.add(prompt, each, seed)
        answers.append([serving.serve(slot, 10) for slot in range(len(params))])
        logprobs = [r.logprobs[2].token for r in serving.results if 2 in r.logprobs]
        assert len(logprobs) == 10
    assert answers[0] == answers[1]


def test_a_step_is_captured_once_for_each_split_and_size(llama, rig):
    serving = rig(llama, device=True)
    for prompt in prompts(1)[:3]:
        serving.add(prompt)
    for slot, length in enumerate(serving.lengths):
        serving.run(chunks=[Chunk(slot, 0, length, True)])
    at = dict(enumerate(serving.lengths))

    def step(rows: int) -> None:
        serving.run({slot: at[slot] for slot in range(rows)})
        for slot in range(rows):
            at[slot] += 1

    step(1)
    step(1)
    assert (len(serving.queue.captured), serving.queue.replays) == (1, 1)
    step(3)
    assert (len(serving.queue.captured), serving.queue.replays) == (2, 1)
    step(3)
    serving.place = place(Split(64, 68))
    step(3)
    assert [p.split for p in serving.queue.captured] == [Split(96, 36), Split(96, 36), Split(64, 68)]
    assert serving.queue.replays == 2


def test_a_padded_row_touches_nobody(llama, rig, greedy):
    """Three rows run as four: the fourth writes only into the spare block and slot."""
    serving = rig(llama, device=True)
    for prompt in prompts(5)[:3]:
        serving.add(prompt)
    lengths = serving.lengths
    serving.run(chunks=[Chunk(slot, 0, length, True) for slot, length in enumerate(lengths)])
    for step in range(7):
        serving.run({slot: length + step for slot, length in enumerate(lengths)})
    answers = [serving.output(slot, 8) for slot in range(3)]
    assert answers == [greedy(llama.model, prompt, 8) for prompt in prompts(5)[:3]]
    untouched = serving.feed.tokens[3:-1]
    assert (untouched == -1).all()
    spare = serving.memory[0][:, -1]
    assert spare[:, 0].isfinite().all() and spare[:, 1:].isnan().all()


def test_beyond_the_budget_steps_run_uncaptured(llama, rig, caplog):
    serving = rig(llama, device=True)
    feed, queue = device_feed(llama, serving.board, serving.memory, budget=1)
    serving.feed, serving.queue, serving.body = feed, queue, ModelBody(feed)
    serving.add(prompts(2)[1])
    serving.add(prompts(2)[2])
    for slot in range(2):
        serving.serve(slot, 4)
    serving.run({0: serving.lengths[0] + 3, 1: serving.lengths[1] + 3})
    assert len(queue.captured) == 1
    assert "all they may" in caplog.text


def test_what_cannot_be_captured_runs_all_the_same(llama, rig, greedy, caplog):
    serving = rig(llama, device=True)
    serving.queue.refuse = RuntimeError("operation not permitted when stream is capturing")
    slot = serving.add(prompts(4)[1])
    assert serving.serve(slot, 8) == greedy(llama.model, prompts(4)[1], 8)
    assert caplog.text.count("are not captured: operation not permitted") == 1


def test_a_step_run_ahead_of_the_end_of_the_board_writes_to_nobody(llama, rig):
    serving = rig(llama, max_len=32, device=True)
    serving.add(range(3, 34))
    serving.run(chunks=[Chunk(0, 0, 31, True)])
    before = serving.feed.tokens[:, :32].clone()
    assert serving.run({0: 31}).slots.tolist() == [0]
    assert torch.equal(serving.feed.tokens[:, :32], before)


def test_a_cached_prefix_counts_for_penalties(llama, rig):
    """The device has never seen tokens whose keys and values came out of the prefix cache; penalties look at them."""
    answers = []
    for device in (False, True):
        serving = rig(llama, device=device)
        params = SamplingParams(repetition_penalty=1.8)
        first, second = serving.add(prompts(6)[3], params), serving.add(prompts(6)[3], params)
        serving.serve(first, 2)
        serving.board.tables[second, :3] = serving.board.tables[first, :3]
        serving.run(chunks=[Chunk(second, 48, 16, True)])
        for step in range(5):
            serving.run({second: 64 + step})
        answers.append(serving.output(second, 6))
    assert answers[0] == answers[1]


def test_the_lane_is_entered_for_every_segment(llama, rig):
    serving = rig(llama, device=True)
    serving.add(prompts(1)[1])
    serving.run(chunks=[Chunk(0, 0, 37, True)], layers=1)
    serving.place = place(Split(64, 68))
    serving.finish(1)
    assert isinstance(serving.queue, CpuQueue)
    assert [p.split for p in serving.queue.entered] == [Split(96, 36), Split(64, 68)]


def test_bad_logits_are_a_failure_of_that_row(llama, rig):
    serving = rig(llama, device=True)
    serving.add(prompts(1)[2])
    serving.run(chunks=[Chunk(0, 0, 5, True)])
    serving.memory[1][0].fill_(torch.nan)
    batch = Batch(np.array([0], np.int32), np.array([5], np.int32))
    sampler = Sampler(SamplingParams(), 5, 0)
    result = serving.body.enqueue(Segment(9, batch, samplers={0: sampler}), serving.place)()
    assert result.failures[0].startswith("the model's logits are not finite")
