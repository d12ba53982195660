"""Processing of logits in groups: each row as if it were alone, through transformers' own call."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from smpart.runtime.processors import History, OutputPenalties, penalised, process
from smpart.runtime.sampling import SamplingParams

VOCAB = 24


@st.composite
def requests(draw) -> list[tuple[list[int], list[int]]]:
    tokens = st.integers(0, VOCAB - 1)
    row = st.tuples(st.lists(tokens, min_size=1, max_size=6), st.lists(tokens, max_size=6))
    return draw(st.lists(row, min_size=1, max_size=5))


def history(rows: list[tuple[list[int], list[int]]]) -> History:
    """Read from a board whose other places hold tokens that must not count."""
    board = torch.randint(0, VOCAB, (len(rows) + 2, 16), dtype=torch.int32)
    slots = torch.arange(len(rows)) + 1
    for slot, (prompt, output) in zip(slots, rows, strict=True):
        board[slot, : len(prompt) + len(output)] = torch.tensor([*prompt, *output])
    lens, ends = (torch.tensor(values) for values in zip(*((len(p), len(p) + len(o)) for p, o in rows), strict=True))
    return History.read(board, int(ends.max()), slots, lens, ends)


def output_penalties(scores: np.ndarray, output: list[int], presence: float, frequency: float) -> np.ndarray:
    """OpenAI's definition, token by token."""
    expected = scores.copy()
    for token in set(output):
        expected[token] -= presence + frequency * output.count(token)
    return expected


@given(rows=requests(), penalty=st.sampled_from([0.01, 0.5, 1.3, 10.0]))
@settings(max_examples=40)
def test_repetition_penalty_of_a_group_is_that_of_each_row_alone(rows, penalty):
    scores = torch.randn(len(rows), VOCAB)
    expected = [
        RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([[*prompt, *output]]), scores[row : row + 1])
        for row, (prompt, output) in enumerate(rows)
    ]
    params = SamplingParams(repetition_penalty=penalty)
    assert torch.equal(process(params, history(rows), scores), torch.cat(expected))


@given(rows=requests(), presence=st.sampled_from([0.0, 0.5, -1.5]), frequency=st.sampled_from([0.0, 0.7, -0.4]))
@settings(max_examples=40)
def test_presence_and_frequency_count_generated_tokens_only(rows, presence, frequency):
    scores = torch.randn(len(rows), VOCAB)
    before = scores.clone()
    known = history(rows)
    penalties = OutputPenalties(presence, frequency, known.generated)
    for penalised_scores in (
        penalties(known.tokens, scores),
        process(SamplingParams(presence_penalty=presence, frequency_penalty=frequency), known, scores),
    ):
        for row, (_, output) in enumerate(rows):
            expected = output_penalties(before[row].numpy(), output, presence, frequency)
            assert penalised_scores[row].numpy() == pytest.approx(expected, abs=1e-5)
    assert torch.equal(scores, before)  # the model's own logits stay, for logprobs


def test_tokens_of_a_prompt_that_have_no_logit_are_passed_over():
    known = history([([VOCAB - 1], [3])])
    known.tokens[0, 0] = VOCAB + 7
    params = SamplingParams(repetition_penalty=2.0, presence_penalty=1.0)
    expected = torch.ones(VOCAB)
    expected[3] = 0.5 - 1.0
    assert torch.equal(process(params, known, torch.ones(1, VOCAB))[0], expected)


def test_the_order_is_that_of_generate():
    rows = [([3, 4, 5, 3], [7, 7, 9]), ([1], [])]
    scores = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(0)) * 2
    params = SamplingParams(
        temperature=1.5, top_k=9, top_p=0.8, min_p=0.05, repetition_penalty=1.3, frequency_penalty=0.25
    )
    for row, (prompt, output) in enumerate(rows):
        ids = torch.tensor([[*prompt, *output]])
        repeated = RepetitionPenaltyLogitsProcessor(1.3)(ids, scores[row : row + 1])
        penalised_scores = torch.from_numpy(output_penalties(repeated[0].numpy(), output, 0.0, 0.25))[None]
        warpers = [TemperatureLogitsWarper(1.5), TopKLogitsWarper(9), TopPLogitsWarper(0.8), MinPLogitsWarper(0.05)]
        expected = LogitsProcessorList(warpers)(ids, penalised_scores)
        assert torch.allclose(process(params, history(rows), scores)[row : row + 1], expected)


@pytest.mark.parametrize(
    ("params", "wanted"),
    [
        ({"temperature": 1.0, "top_k": 3}, False),
        ({"repetition_penalty": 1.1}, True),
        ({"presence_penalty": -0.1}, True),
        ({"frequency_penalty": 0.1}, True),
    ],
)
def test_only_penalties_need_a_history(params, wanted):
    assert penalised(SamplingParams(**params)) is wanted


def test_greedy_without_penalties_changes_nothing():
    scores = torch.randn(2, VOCAB)
    assert process(SamplingParams(top_k=3, top_p=0.5, min_p=0.5), None, scores) is scores
