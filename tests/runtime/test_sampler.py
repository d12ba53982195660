"""Choosing tokens: transformers' processors as the oracle, distributions by chi-square, seeds, failures, no waiting."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from smpart.runtime.batch import Sampler
from smpart.runtime.sampler import Choice, choose
from smpart.runtime.sampling import SamplingParams

VOCAB = 32
PROMPT = [3, 4, 5, 3]
OUTPUT = [7, 7, 9]
EVERY = [
    dict(zip(settings, values, strict=True))
    for settings in [
        {
            "temperature": (0.0, 0.7),
            "top_k": (0, 5),
            "top_p": (1.0, 0.8),
            "min_p": (0.0, 0.1),
            "repetition_penalty": (1.0, 1.3),
            "presence_penalty": (0.0, 0.5),
            "frequency_penalty": (0.0, -0.3),
            "logprobs": (None, 0, 3),
        }
    ]
    for values in itertools.product(*settings.values())
]


def board(rows: int = 1) -> torch.Tensor:
    """int32[rows, 64]; what lies past a request's tokens must not matter."""
    tokens = torch.randint(0, VOCAB, (rows, 64), dtype=torch.int32)
    tokens[:, : len(PROMPT) + len(OUTPUT)] = torch.tensor([*PROMPT, *OUTPUT])
    return tokens


def logits(rows: int = 1, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2


def choose_rows(scores: torch.Tensor, samplers: list[Sampler]) -> Choice:
    """Choose after `OUTPUT`, a slot a row."""
    rows = len(samplers)
    at = np.full(rows, len(PROMPT) + len(OUTPUT), np.int32)
    return choose(scores, samplers, np.arange(rows, dtype=np.int32), at, board(rows).to(scores.device))


def pick(scores: torch.Tensor, params: SamplingParams, seed: int = 0) -> int:
    return int(choose_rows(scores, [Sampler(params, len(PROMPT), seed)]).tokens[0])


def draw(scores: torch.Tensor, params: SamplingParams, seeds: range, indexes: range) -> np.ndarray:
    """Tokens for every seed and output index, after the same tokens (repeated to the length that the index needs)."""
    longest = len(PROMPT) + indexes.stop
    tokens = torch.tensor([*PROMPT, *OUTPUT, *OUTPUT * longest])[None, :longest].int()
    pairs = list(itertools.product(seeds, indexes))
    samplers = [Sampler(params, len(PROMPT), seed) for seed, _ in pairs]
    at = np.array([len(PROMPT) + index for _, index in pairs], np.int32)
    return choose(scores.expand(len(pairs), -1), samplers, np.zeros_like(at), at, tokens).tokens.numpy()


def test_greedy_takes_the_likeliest_of_each_row():
    scores = logits(3)
    chosen = choose_rows(scores, [Sampler(SamplingParams(), len(PROMPT), 0)] * 3).fetch()()
    assert chosen.tokens.tolist() == scores.argmax(-1).tolist()
    assert chosen.tokens.dtype == np.int32
    assert not chosen.failures and not chosen.logprobs


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
@pytest.mark.parametrize(("seeds", "indexes"), [(range(4000), range(3, 4)), (range(1), range(3, 4003))])
def test_samples_follow_the_distribution_of_transformers_processors(params, oracle, seeds, indexes):
    scores = logits()
    known = torch.tensor([[*PROMPT, *OUTPUT]])
    expected = LogitsProcessorList(oracle)(known, scores.clone()).double().softmax(-1)[0].numpy()
    drawn = draw(scores, SamplingParams(**params), seeds, indexes)
    counts = np.bincount(drawn, minlength=VOCAB)
    assert not counts[expected == 0].any()
    likely = expected * len(drawn) >= 5  # the chi-square approximation needs about five of each; pool the others
    pooled = [np.append(of[likely], of[~likely].sum()) for of in (counts, expected * len(drawn))]
    if pooled[1][-1] < 1:
        pooled = [of[:-1] for of in pooled]
        pooled[1] *= pooled[0].sum() / pooled[1].sum()
    assert stats.chisquare(*pooled).pvalue > 1e-4


def test_repetition_penalty_covers_prompt_and_output_as_in_transformers():
    scores = logits()
    known = torch.tensor([[*PROMPT, *OUTPUT]])
    expected = RepetitionPenaltyLogitsProcessor(5.0)(known, scores.clone()).argmax().item()
    assert pick(scores, SamplingParams(repetition_penalty=5.0)) == expected


def test_a_seed_reproduces_and_different_indexes_and_seeds_differ():
    flat, params = torch.zeros(1, VOCAB), SamplingParams(temperature=1.0)
    draws = [draw(flat, params, range(seed, seed + 1), range(40)).tolist() for seed in (1, 1, 2, 2**62 + 1, 2**63 + 1)]
    assert draws[0] == draws[1]
    assert len(set(map(tuple, draws))) == 4
    assert all(len(set(tokens)) > 10 for tokens in draws)


def test_the_noise_depends_on_the_output_index_and_not_on_the_prompt():
    samplers = [Sampler(SamplingParams(temperature=1.0), prompt_len, 3) for prompt_len in range(1, 21)]
    at = np.arange(6, 26, dtype=np.int32)
    tokens = choose(torch.zeros(20, VOCAB), samplers, np.zeros_like(at), at, board()).tokens
    assert len(set(tokens.tolist())) == 1


def test_neighbours_do_not_change_a_choice():
    """A batch of every combination of parameters, in mixed groups, chooses what each row chooses alone."""
    rows, random = len(EVERY), np.random.default_rng(0)
    scores = logits(rows)
    tokens = torch.from_numpy(random.integers(0, VOCAB, (rows, 40), dtype=np.int32))
    slots, lens = random.permutation(rows).astype(np.int32), random.integers(1, 20, rows)
    at = (lens + random.integers(0, 20, rows)).astype(np.int32)
    samplers = [Sampler(SamplingParams(**each), int(lens[i]), i) for i, each in enumerate(EVERY)]
    together = choose(scores, samplers, slots, at, tokens).fetch()()
    for row in range(rows):
        one = slice(row, row + 1)
        alone = choose(scores[one], samplers[one], slots[one], at[one], tokens).fetch()()
        assert together.tokens[row] == alone.tokens[0]
        assert together.logprobs.get(row) == alone.logprobs.get(0)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("params", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.5, "top_k": 3}])
def test_unusable_logits_fail_their_row_only(bad, params):
    scores = logits(3)
    expected = choose_rows(scores, samplers := [Sampler(SamplingParams(**params, logprobs=1), len(PROMPT), 0)] * 3)
    scores[1, 4] = bad
    choice = choose_rows(scores, samplers)
    chosen = choice.fetch()()
    assert choice.finite.tolist() == [True, False, True]
    assert list(chosen.failures) == [1] and "not finite" in chosen.failures[1]
    assert chosen.tokens.tolist() == [expected.tokens[0], 0, expected.tokens[2]]
    assert sorted(chosen.logprobs) == [0, 2]


def test_a_row_of_nothing_but_minus_infinity_fails_and_one_cut_token_does_not():
    scores = logits(2)
    scores[0] = -torch.inf
    scores[1, 4] = -torch.inf
    assert choose_rows(scores, [Sampler(SamplingParams(), len(PROMPT), 0)] * 2).finite.tolist() == [False, True]


def test_logprobs_are_of_the_models_own_distribution():
    scores = logits(3)
    params = {"temperature": 3.0, "repetition_penalty": 2.0}
    samplers = [Sampler(SamplingParams(**params, logprobs=count), len(PROMPT), 1) for count in (3, None, 1)]
    chosen = choose_rows(scores, samplers).fetch()()
    assert sorted(chosen.logprobs) == [0, 2]
    for row, count in ((0, 3), (2, 1)):
        expected = scores[row].log_softmax(-1)
        assert chosen.logprobs[row].token == pytest.approx(expected[chosen.tokens[row]].item())
        values, tokens = expected.topk(count)
        assert [token for token, _ in chosen.logprobs[row].top] == tokens.tolist()
        assert [value for _, value in chosen.logprobs[row].top] == pytest.approx(values.tolist())


def test_low_precision_logits_are_processed_in_float32():
    samplers = [Sampler(SamplingParams(**params), len(PROMPT), seed) for seed, params in enumerate(EVERY)]
    scores = logits(len(samplers)).bfloat16()
    low, full = (choose_rows(of, samplers).fetch()() for of in (scores, scores.float()))
    assert low.tokens.tolist() == full.tokens.tolist()
    assert low.logprobs == full.logprobs
    params, one = SamplingParams(temperature=0.7), scores[:1]
    assert np.array_equal(*(draw(of, params, range(4000), range(1)) for of in (one, one.float())))


def test_no_more_logprobs_than_there_are_tokens():
    chosen = choose_rows(logits()[:, :4], [Sampler(SamplingParams(logprobs=20), 1, 0)]).fetch()()
    assert len(chosen.logprobs[0].top) == 4


def test_on_the_cpu_nothing_is_copied():
    choice = choose_rows(logits(3), [Sampler(SamplingParams(temperature=1.0), len(PROMPT), 0)] * 3)
    assert choice.fetch()().tokens.ctypes.data == choice.tokens.data_ptr()


@pytest.fixture
def no_host_reads(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    from no_host_reads import no_host_reads

    return no_host_reads


@pytest.mark.parametrize(
    ("device", "dtype", "alone"), [("cpu", torch.float32, True), ("cpu", torch.bfloat16, False), ("meta", None, False)]
)
def test_choosing_never_waits_for_the_device(no_host_reads, device, dtype, alone):
    """For every combination of parameters in one batch, some also alone. On `meta` there is nothing to read."""
    samplers = [Sampler(SamplingParams(**params), len(PROMPT), 5) for params in EVERY]
    scores = logits(len(samplers)).to(device, dtype)
    tokens, slots = board(len(samplers)).to(device), np.arange(len(samplers), dtype=np.int32)
    at = np.full(len(samplers), 7, np.int32)
    with no_host_reads():
        choice = choose(scores, samplers, slots, at, tokens)
        for row in range(0, len(samplers) * alone, 7):
            choose(scores[row : row + 1], samplers[row : row + 1], slots[:1], at[:1], tokens)
    assert (choice.tokens.dtype, choice.finite.dtype) == (torch.int32, torch.bool)
    assert choice.tokens.device == choice.finite.device == scores.device


class Uploads(TorchDispatchMode):
    """Counts copies from the host to a device."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._to_copy.default and args[0].device.type == "cpu":
            self.count += torch.device((kwargs or {}).get("device", "cpu")).type != "cpu"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("params", "copies"), [([{}, {"top_k": 5}], 0), ([{"logprobs": 2}, {}], 1), (EVERY, 1)])
def test_a_call_sends_at_most_one_tensor_to_the_device(params, copies):
    samplers = [Sampler(SamplingParams(**each), len(PROMPT), 5) for each in params]
    with Uploads() as uploads:
        choose_rows(logits(len(samplers)).to("meta"), samplers)
    assert uploads.count - 2 == copies  # the logits and the board are put there first


@pytest.mark.gpu
def test_a_gpu_chooses_as_the_cpu_does_without_a_synchronisation():
    scores = logits(len(EVERY))
    samplers = [Sampler(SamplingParams(**params), len(PROMPT), seed) for seed, params in enumerate(EVERY)]
    expected = choose_rows(scores, samplers).fetch()()
    slots, at = np.arange(len(samplers), dtype=np.int32), np.full(len(samplers), 7, np.int32)
    on_device, tokens = scores.cuda(), board(len(samplers)).cuda()
    choose(on_device, samplers, slots, at, tokens)  # first calls load kernels
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        read = choose(on_device, samplers, slots, at, tokens).fetch()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    chosen = read()
    assert chosen.tokens.tolist() == expected.tokens.tolist()
    assert sorted(chosen.logprobs) == sorted(expected.logprobs)


def test_the_coldest_temperatures_are_greedy_and_do_not_overflow():
    assert SamplingParams(temperature=1e-300).greedy
    assert SamplingParams(temperature=1e-4).temperature == 1e-4


def test_none_is_taken_for_no_stops():
    params = SamplingParams(stop=None, stop_token_ids=None)
    assert (params.stop, params.stop_token_ids) == ((), ())
