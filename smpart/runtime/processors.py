"""transformers' logits processors for a group of requests with the same parameters, and ours for OpenAI's penalties."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from smpart.runtime.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class History:
    """Known tokens of a group of requests.

    Attributes:
        tokens: int64[rows, longest]; past a request's end its first token is repeated.
        generated: bool[rows, longest], which of them are outputs.
    """

    tokens: Tensor
    generated: Tensor

    @classmethod
    def read(cls, board: Tensor, longest: int, slots: Tensor, prompt_lens: Tensor, ends: Tensor) -> History:
        """Gather histories on the device.

        Args:
            board: int32[slots, max_len].
            longest: the largest of `ends`, known to the host.
            slots, prompt_lens, ends: int64[rows]; a request's tokens are ``0 ... ends - 1`` of its slot, and those
                from `prompt_lens` on are outputs.
        """
        tokens = board[:, :longest].index_select(0, slots).long()
        at = torch.arange(longest, device=board.device)
        known = at < ends[:, None]
        # A repetition penalty counts a token once, however often it occurs.
        return cls(torch.where(known, tokens, tokens[:, :1]), known & (at >= prompt_lens[:, None]))


class OutputPenalties(LogitsProcessor):
    """OpenAI's presence and frequency penalties, over generated tokens only.

    ``logit[t] -= presence * (t was generated) + frequency * (times t was generated)``

    Args:
        generated: bool[rows, length], which of the tokens given with the scores count.
    """

    def __init__(self, presence: float, frequency: float, generated: Tensor) -> None:
        self.presence, self.frequency, self.generated = presence, frequency, generated

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Penalise [rows, vocab] scores; `input_ids` is int64[rows, length]."""
        # A prompt may hold tokens that have no logit.
        outputs = input_ids.masked_fill(~self.generated, 0)
        counts = torch.zeros_like(scores).scatter_add_(1, outputs, self.generated.to(scores.dtype))
        return scores - self.presence * (counts > 0) - self.frequency * counts


def penalised(params: SamplingParams) -> bool:
    """Whether the choice depends on earlier tokens."""
    return params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0


def process(params: SamplingParams, history: History | None, scores: Tensor) -> Tensor:
    """Apply what the parameters ask for, in the order in which transformers' ``generate`` does.

    Args:
        history: of each row; None if the parameters are not `penalised`.
        scores: float32[rows, vocab]; they stay as they are.

    Returns:
        float32[rows, vocab]; tokens that are cut are -inf.
    """
    steps = [] if history is None else _penalties(params, history)
    if not params.greedy:
        steps += _warpers(params)
    known = scores.new_empty(len(scores), 0, dtype=torch.int64) if history is None else history.tokens
    for step in steps:
        scores = step(cast(torch.LongTensor, known), cast(torch.FloatTensor, scores))
    return scores


def _penalties(params: SamplingParams, history: History) -> list[LogitsProcessor]:
    steps: list[LogitsProcessor] = []
    if params.repetition_penalty != 1.0:
        steps.append(RepetitionPenaltyLogitsProcessor(float(params.repetition_penalty)))
    if params.presence_penalty or params.frequency_penalty:
        steps.append(OutputPenalties(params.presence_penalty, params.frequency_penalty, history.generated))
    return steps


def _warpers(params: SamplingParams) -> list[LogitsProcessor]:
    steps: list[LogitsProcessor] = []
    if params.temperature != 1.0:
        steps.append(TemperatureLogitsWarper(float(params.temperature)))
    if params.top_k > 0:
        steps.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1.0:
        steps.append(TopPLogitsWarper(float(params.top_p)))
    if params.min_p > 0.0:
        steps.append(MinPLogitsWarper(params.min_p))
    return steps
