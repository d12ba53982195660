"""A body's contract: what it answers, what it refuses, and that a fault costs only what it touched."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from smpart.errors import UsageError
from smpart.partition import Body
from smpart.runtime.adapter import ModelAdapter
from smpart.runtime.batch import Chunk, Segment
from smpart.runtime.body import MAX_PAUSED
from smpart.runtime.families import random_model
from smpart.runtime.feed import HostFeed
from smpart.runtime.sampling import SamplingParams


@pytest.fixture
def adapter() -> ModelAdapter:
    return ModelAdapter(random_model("llama"))


def test_it_is_a_lane_body(adapter, rig):
    assert isinstance(rig(adapter).body, Body)


def test_decode_rows_come_first_then_sampling_chunks(adapter, rig):
    serving = rig(adapter)
    for length in (40, 9, 20, 30):
        serving.add(range(3, 3 + length))
    serving.run(chunks=[Chunk(0, 0, 40, True), Chunk(1, 0, 9, True)])
    result = serving.run({1: 9, 0: 40}, [Chunk(2, 0, 5, False), Chunk(3, 0, 30, True)])
    assert result.done
    assert result.slots.tolist() == [1, 0, 3]
    assert result.tokens.tolist() == [serving.board.tokens[s, p] for s, p in ((1, 10), (0, 41), (3, 30))]
    assert result.slots.dtype == result.tokens.dtype == np.int32


def test_a_chunk_that_samples_nothing_answers_nothing(adapter, rig):
    serving = rig(adapter)
    serving.add(range(3, 23))
    result = serving.run(chunks=[Chunk(0, 0, 10, False)])
    assert result.done and len(result.slots) == len(result.tokens) == 0


def test_a_paused_forward_reads_nothing_written_after_it_started(adapter, rig, greedy):
    prompt = list(range(3, 40))
    expected = greedy(adapter.model, prompt, 1)
    serving = rig(adapter)
    serving.add(prompt)
    assert not serving.run(chunks=[Chunk(0, 0, 37, True)], layers=1).done
    serving.board.tokens[0, :5] = 400  # its input was read when it started
    assert serving.finish(1).tokens.tolist() == expected


def test_resuming_what_is_not_paused_is_refused(adapter, rig):
    with pytest.raises(UsageError, match="forward 7 is not paused"):
        rig(adapter).finish(7)


def test_dropping_a_forward_leaves_the_others(adapter, rig, greedy):
    prompts = [list(range(3, 30)), list(range(100, 117))]
    expected = [greedy(adapter.model, prompt, 1)[0] for prompt in prompts]
    serving = rig(adapter)
    for slot, prompt in enumerate(prompts):
        serving.add(prompt)
        serving.run(chunks=[Chunk(slot, 0, len(prompt), True)], layers=1)
    result = serving.body.run(Segment(2, drop=(1, 99)))
    assert result.tokens.tolist() == [expected[1]]
    with pytest.raises(UsageError, match="not paused"):
        serving.finish(1)
    assert serving.serve(0, 1) == [expected[0]]


def test_paused_forwards_are_bounded(adapter, rig):
    serving = rig(adapter)
    serving.add(range(3, 40))
    for _ in range(MAX_PAUSED):
        serving.run(chunks=[Chunk(0, 0, 4, False)], layers=1)
    with pytest.raises(UsageError, match="paused here already"):
        serving.run(chunks=[Chunk(0, 0, 4, False)], layers=1)
    assert serving.run(chunks=[Chunk(0, 0, 4, False)]).done  # one that does not pause is welcome
    serving.body.close()
    assert not serving.run(chunks=[Chunk(0, 0, 4, False)], layers=1).done


@pytest.mark.parametrize("layers", [None, 1])
def test_an_exception_inside_a_forward_drops_it_and_the_body_goes_on(adapter, rig, greedy, layers):
    prompt = list(range(3, 30))
    expected = greedy(adapter.model, prompt, 3)
    serving = rig(adapter)
    serving.add(prompt)

    def broken(*_: object) -> None:
        raise RuntimeError("out of memory")

    handle = adapter.layers[1].register_forward_pre_hook(broken)
    with pytest.raises(RuntimeError, match="out of memory"):
        serving.run(chunks=[Chunk(0, 0, 27, True)], layers=layers)
        serving.finish(1)
    handle.remove()
    with pytest.raises(UsageError, match="not paused"):
        serving.finish(1)
    assert serving.serve(0, 3) == expected
    assert greedy(adapter.model, prompt, 3) == expected  # outside a paged call the model is its own again


def test_nan_fails_only_its_slot(adapter, rig, greedy):
    good, bad = list(range(3, 30)), [511, 5, 6]
    expected = greedy(adapter.model, good, 4)
    with torch.no_grad():
        adapter.model.get_input_embeddings().weight[511] = torch.nan
    serving = rig(adapter)
    serving.add(good)
    serving.add(bad, SamplingParams(logprobs=1))
    result = serving.run(chunks=[Chunk(0, 0, 27, True), Chunk(1, 0, 3, True)])
    for step in range(3):
        result = serving.run({0: 27 + step, 1: 3 + step})
        assert list(result.failures) == [1]
        assert "not finite" in result.failures[1]
        assert not result.logprobs
    assert serving.output(0, 4) == expected


def test_blocks_of_a_failed_request_are_safe_to_reuse(adapter, rig, greedy):
    prompt = list(range(3, 20))
    expected = greedy(adapter.model, prompt, 4)
    serving = rig(adapter)
    for pages in serving.memory:
        pages.fill_(torch.nan)
    serving.add(prompt)
    serving.add(range(40, 60))
    serving.run(chunks=[Chunk(0, 0, 17, True), Chunk(1, 0, 20, True)])
    for step in range(3):
        assert not serving.run({0: 17 + step, 1: 20 + step}).failures
    assert serving.output(0, 4) == expected


def test_logprobs_by_slot_for_those_who_asked(adapter, rig):
    serving = rig(adapter)
    serving.add(range(3, 30))
    serving.add(range(3, 30), SamplingParams(logprobs=2))
    result = serving.run(chunks=[Chunk(0, 0, 27, True), Chunk(1, 0, 27, True)])
    assert list(result.logprobs) == [1]
    assert result.logprobs[1].top[0] == (result.tokens[1], result.logprobs[1].token)
    with torch.inference_mode():
        expected = adapter.model(torch.arange(3, 30)[None]).logits[0, -1].log_softmax(-1)
    assert result.logprobs[1].token == pytest.approx(expected.max().item(), abs=1e-4)


def test_a_seed_gives_the_same_text_under_any_schedule(adapter, rig):
    params = SamplingParams(temperature=1.0, top_p=0.9, presence_penalty=0.5, repetition_penalty=1.1)
    answers = set()
    for seed in range(3):
        serving = rig(adapter, seed=seed)
        for slot in range(3):
            serving.add(range(3 + slot, 30 + slot), params, seed=slot)
        answers.add(tuple(map(tuple, serving.serve_all(10))))
    alone = rig(adapter)
    alone.add(range(3, 30), params, seed=0)
    assert len(answers) == 1
    assert tuple(alone.serve(0, 10)) == answers.pop()[0]


def test_a_step_ahead_past_the_end_of_the_board_writes_nothing(adapter, rig):
    serving = rig(adapter, max_len=32)
    serving.add(range(3, 34))
    serving.run(chunks=[Chunk(0, 0, 31, True)])
    before = serving.board.tokens.copy()
    assert serving.run({0: 31}).slots.tolist() == [0]
    assert np.array_equal(serving.board.tokens, before)


def test_memory_that_does_not_fit_the_model_is_refused(adapter, rig):
    board = rig(adapter).board
    with pytest.raises(UsageError, match="KV memory does not fit"):
        HostFeed(adapter, [torch.zeros(2, 4, 16, 3, 16)] * 2, board)


@pytest.mark.parametrize("device", [False, True])
def test_a_forward_without_rows_is_refused(adapter, rig, device):
    serving = rig(adapter, device=device)
    slot = serving.add(range(3, 20))
    for chunks in ([], [Chunk(slot, 0, 0, False)], [Chunk(slot, 0, 5, False), Chunk(slot, 5, 0, False)]):
        with pytest.raises(UsageError, match="a forward with"):
            serving.run(chunks=chunks)
    assert serving.run(chunks=[Chunk(slot, 0, 17, True)]).done


def test_bfloat16_runs(rig):
    serving = rig(ModelAdapter(random_model("qwen3", torch.bfloat16)))
    serving.add(range(3, 30))
    serving.add(range(3, 20))
    assert all(len(answer) == 6 for answer in serving.serve_all(6))


@pytest.mark.slow
@pytest.mark.smollm2
def test_smollm2_answers_as_generate(rig, greedy):
    from smpart.runtime.models import load_model

    model, tokenizer = load_model("smollm2")
    texts = ["The capital of France is", "Once upon a time there was a small model that " * 6]
    prompts = [tokenizer.encode(text) for text in texts]
    expected = [greedy(model, prompt, 12) for prompt in prompts]
    serving = rig(ModelAdapter(model))
    for prompt in prompts:
        serving.add(prompt)
    assert serving.serve_all(12) == expected
