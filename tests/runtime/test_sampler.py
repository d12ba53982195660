"""Choosing tokens: transformers' processors as the oracle, distributions checked by counting, seeds, failures."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from smpart.runtime.batch import Sampler
from smpart.runtime.board import Board
from smpart.runtime.sampler import choose, gumbel, processors
from smpart.runtime.sampling import SamplingParams

VOCAB = 32
PROMPT = [3, 4, 5, 3]
OUTPUT = [7, 7, 9]


def board(rows: int = 1) -> Board:
    made = Board.over(bytearray(Board.size(rows, 64, 16)), rows, 64, 16)
    for slot in range(rows):
        made.write_tokens(slot, [*PROMPT, *OUTPUT])
    return made


def logits(rows: int = 1, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2


def pick(scores: torch.Tensor, params: SamplingParams, seed: int = 0, index: int = len(OUTPUT)) -> int:
    at = np.array([len(PROMPT) + index], np.int32)
    choice = choose(scores, [Sampler(params, len(PROMPT), seed)], np.zeros(1, np.int32), at, board())
    return int(choice.tokens[0])


def test_greedy_takes_the_likeliest_of_each_row():
    scores = logits(3)
    samplers = [Sampler(SamplingParams(), len(PROMPT), 0)] * 3
    choice = choose(scores, samplers, np.arange(3, dtype=np.int32), np.full(3, 7, np.int32), board(3))
    assert choice.tokens.tolist() == scores.argmax(-1).tolist()
    assert choice.tokens.dtype == np.int32
    assert not choice.failures and not choice.logprobs


@pytest.mark.parametrize(
    ("params", "oracle"),
    [
        ({"temperature": 0.7}, [TemperatureLogitsWarper(0.7)]),
        ({"temperature": 1.0, "top_k": 5}, [TopKLogitsWarper(5)]),
        ({"temperature": 1.0, "top_p": 0.6}, [TopPLogitsWarper(0.6)]),
        ({"temperature": 1.0, "min_p": 0.1}, [MinPLogitsWarper(0.1)]),
        (
            {"temperature": 1.5, "top_k": 9, "top_p": 0.8, "min_p": 0.05, "repetition_penalty": 1.3},
            [
                RepetitionPenaltyLogitsProcessor(1.3),
                TemperatureLogitsWarper(1.5),
                TopKLogitsWarper(9),
                TopPLogitsWarper(0.8),
                MinPLogitsWarper(0.05),
            ],
        ),
    ],
)
def test_samples_follow_the_distribution_of_transformers_processors(params, oracle):
    scores = logits()
    known = torch.tensor([[*PROMPT, *OUTPUT]])
    expected = LogitsProcessorList(oracle)(known, scores.clone()).softmax(-1)[0].numpy()
    draws = 400
    counts = np.bincount([pick(scores, SamplingParams(**params), seed) for seed in range(draws)], minlength=VOCAB)
    assert not counts[expected == 0].any()
    spread = np.sqrt(expected * (1 - expected) / draws)
    assert (np.abs(counts / draws - expected) <= 5 * spread + 1e-3).all()


def test_repetition_penalty_covers_prompt_and_output_as_in_transformers():
    scores = logits()
    known = torch.tensor([[*PROMPT, *OUTPUT]])
    expected = RepetitionPenaltyLogitsProcessor(5.0)(known, scores.clone()).argmax().item()
    assert pick(scores, SamplingParams(repetition_penalty=5.0)) == expected


@pytest.mark.parametrize(("presence", "frequency"), [(0.5, 0.0), (0.0, 0.7), (1.5, -0.4)])
def test_presence_and_frequency_count_generated_tokens_only(presence, frequency):
    scores = torch.zeros(1, VOCAB)
    params = SamplingParams(presence_penalty=presence, frequency_penalty=frequency)
    penalised = processors(params, len(PROMPT))(torch.tensor([[*PROMPT, *OUTPUT]]), scores)[0]
    expected = torch.zeros(VOCAB)
    for token in set(OUTPUT):
        expected[token] = -presence - frequency * OUTPUT.count(token)
    assert torch.allclose(penalised, expected)
    assert not scores.any()  # the model's own logits stay, for logprobs


def test_a_seed_reproduces_and_different_indices_and_seeds_differ():
    flat = torch.zeros(1, VOCAB)
    params = SamplingParams(temperature=1.0)
    draws = [[pick(flat, params, seed, index) for index in range(40)] for seed in (1, 1, 2)]
    assert draws[0] == draws[1]
    assert draws[0] != draws[2]
    assert len(set(draws[0])) > 10


def test_neighbours_do_not_change_a_sample():
    scores, params = logits(4), SamplingParams(temperature=1.0, top_p=0.9)
    samplers = [Sampler(params, len(PROMPT), seed) for seed in range(4)]
    together = choose(scores, samplers, np.arange(4, dtype=np.int32), np.full(4, 7, np.int32), board(4))
    assert together.tokens.tolist() == [pick(scores[row : row + 1], params, row) for row in range(4)]


def test_noise_is_gumbel_and_a_prefix_of_a_longer_draw():
    noise = gumbel(5, 3, 20_000)
    assert np.array_equal(noise[:101], gumbel(5, 3, 101))
    assert abs(noise.mean() - np.euler_gamma) < 0.05  # mean and variance of the standard Gumbel distribution
    assert abs(noise.var() - np.pi**2 / 6) < 0.1


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_unusable_logits_fail_their_row_only(bad, temperature):
    scores = logits(3)
    scores[1, 4] = bad
    samplers = [Sampler(SamplingParams(temperature=temperature, logprobs=1), len(PROMPT), 0)] * 3
    choice = choose(scores, samplers, np.arange(3, dtype=np.int32), np.full(3, 7, np.int32), board(3))
    assert list(choice.failures) == [1]
    assert choice.tokens[1] == 0
    assert sorted(choice.logprobs) == [0, 2]


def test_logprobs_are_of_the_models_own_distribution():
    scores = logits()
    params = SamplingParams(temperature=3.0, repetition_penalty=2.0, logprobs=3)
    choice = choose(scores, [Sampler(params, len(PROMPT), 1)], np.zeros(1, np.int32), np.array([7], np.int32), board())
    expected = scores[0].log_softmax(-1)
    assert choice.logprobs[0].token == pytest.approx(expected[choice.tokens[0]].item())
    values, tokens = expected.topk(3)
    assert [token for token, _ in choice.logprobs[0].top] == tokens.tolist()
    assert [value for _, value in choice.logprobs[0].top] == pytest.approx(values.tolist())


def test_the_coldest_temperatures_are_greedy_and_do_not_overflow():
    assert SamplingParams(temperature=1e-300).greedy
    assert SamplingParams(temperature=1e-4).temperature == 1e-4


def test_none_is_taken_for_no_stops():
    params = SamplingParams(stop=None, stop_token_ids=None)
    assert (params.stop, params.stop_token_ids) == ((), ())
