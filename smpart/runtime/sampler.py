"""Chooses tokens from logits, through transformers' own logits processors.

Noise is a function of (seed, output index, token id) alone, so a seed reproduces its text under any schedule and in
any batch: the token is ``argmax(log p + Gumbel noise)`` (the Gumbel-max trick), the noise of a counter-based
generator (Philox; Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from smpart.runtime.batch import Sampler, TokenLogprobs
from smpart.runtime.board import Board
from smpart.runtime.sampling import SamplingParams

_NOT_FINITE = "the model's logits are not finite (NaN or infinity)"


class OutputPenalties(LogitsProcessor):
    """OpenAI's presence and frequency penalties, over generated tokens only.

    ``logit[t] -= presence * (t was generated) + frequency * (times t was generated)``
    """

    def __init__(self, presence: float, frequency: float, prompt_len: int) -> None:
        self.presence, self.frequency, self.prompt_len = presence, frequency, prompt_len

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Penalise [rows, vocab] scores; each row of `input_ids` is a prompt and what was generated after it."""
        generated = input_ids[:, self.prompt_len :]
        counts = torch.zeros_like(scores).scatter_add_(1, generated, torch.ones_like(generated, dtype=scores.dtype))
        return scores - self.presence * (counts > 0) - self.frequency * counts


@dataclass(frozen=True, slots=True)
class Choice:
    """Tokens chosen for the rows of one forward; failures and logprobs by row."""

    tokens: NDArray[np.int32]
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    failures: dict[int, str] = field(default_factory=dict)


def choose(
    logits: Tensor, samplers: Sequence[Sampler], slots: NDArray[np.int32], at: NDArray[np.int32], board: Board
) -> Choice:
    """Choose one token for each row.

    Args:
        logits: [m, vocab].
        samplers, slots, at: of each row: how to choose, the request, the board position the token will go to.
        board: history for penalties.

    Returns:
        Tokens. A row whose logits are not finite is listed as a failure and its token is 0.
    """
    best, token = logits.max(-1)
    tokens = token.numpy().astype(np.int32)
    failures = dict.fromkeys(torch.nonzero(~best.isfinite()).flatten().tolist(), _NOT_FINITE)
    tokens[list(failures)] = 0
    logprobs = {}
    for row, sampler in enumerate(samplers):
        if row in failures:
            continue
        params = sampler.params
        if not params.greedy or _penalised(params):
            history = board.tokens[slots[row], : at[row]]
            tokens[row] = _choose_one(logits[row : row + 1].float(), sampler, history)
        if params.logprobs is not None:
            logprobs[row] = _logprobs(logits[row].float(), int(tokens[row]), params.logprobs)
    return Choice(tokens, logprobs, failures)


def processors(params: SamplingParams, prompt_len: int) -> LogitsProcessorList:
    """transformers' processors for these parameters, in the order in which its ``generate`` applies them."""
    steps = LogitsProcessorList()
    if params.repetition_penalty != 1.0:
        steps.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    if params.presence_penalty or params.frequency_penalty:
        steps.append(OutputPenalties(params.presence_penalty, params.frequency_penalty, prompt_len))
    if params.greedy:
        return steps
    if params.temperature != 1.0:
        steps.append(TemperatureLogitsWarper(float(params.temperature)))
    if params.top_k > 0:
        steps.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1.0:
        steps.append(TopPLogitsWarper(float(params.top_p)))
    if params.min_p > 0.0:
        steps.append(MinPLogitsWarper(params.min_p))
    return steps


def gumbel(seed: int, index: int, count: int) -> NDArray[np.float64]:
    """Standard Gumbel noise of tokens ``0 ... count`` for output `index` under `seed`."""
    # The index sits in the counter's high words: the low word counts tokens, so no two outputs share a draw.
    bits = np.random.Philox(key=seed & (2**128 - 1), counter=[0, 0, index, 0]).random_raw((count + 1) // 2)
    uniform = (bits.view(np.uint32)[:count] + 0.5) * 2.0**-32
    noise: NDArray[np.float64] = -np.log(-np.log(uniform))
    return noise


def _penalised(params: SamplingParams) -> bool:
    return params.repetition_penalty != 1.0 or bool(params.presence_penalty or params.frequency_penalty)


def _choose_one(row: Tensor, sampler: Sampler, history: NDArray[np.int32]) -> int:
    """Choose from one row of logits, [1, vocab]."""
    known = cast(torch.LongTensor, torch.from_numpy(history.astype(np.int64))[None])
    scores = processors(sampler.params, sampler.prompt_len)(known, row)[0].numpy()
    if sampler.params.greedy:
        return int(scores.argmax())
    return int((scores + gumbel(sampler.seed, len(history) - sampler.prompt_len, len(scores))).argmax())


def _logprobs(row: Tensor, token: int, count: int) -> TokenLogprobs:
    """Of the model's own distribution: before temperature, penalties and cuts."""
    logprobs = row.log_softmax(-1)
    values, indices = logprobs.topk(min(count, len(row)))
    return TokenLogprobs(float(logprobs[token]), tuple(zip(indices.tolist(), values.tolist(), strict=True)))
