"""Chooses tokens from logits on the logits' device, through transformers' own logits processors.

Nothing here waits for the device, so a step that samples can be queued behind the one before it; what a call has to
send there goes up in one copy.

Sampling is ``argmax(log p + Gumbel noise)`` (the Gumbel-max trick). The noise is a function of (seed, output index,
token id) alone, so a seed reproduces its text under any schedule and in any batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter

import numpy as np
import torch
from torch import Tensor

from smpart.runtime.batch import Rows, Sampler, TokenLogprobs
from smpart.runtime.noise import gumbel
from smpart.runtime.processors import History, penalised, process

_NOT_FINITE = "the model's logits are not finite (NaN or infinity)"

_processing = attrgetter(
    "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"
)


@dataclass(frozen=True, slots=True)
class Chosen:
    """Tokens chosen for the rows of one forward, on the host.

    Attributes:
        tokens: int32[m]; 0 where a row failed.
        logprobs: by row, for those that asked and did not fail.
        failures: by row, why its logits were unusable.
    """

    tokens: Rows
    logprobs: dict[int, TokenLogprobs]
    failures: dict[int, str]


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log-probabilities in the model's own distribution: before temperature, penalties and cuts.

    Attributes:
        counts: for each of the n rows that asked, in order, how many of the likeliest tokens it wants.
        own: float32[n], of the chosen tokens.
        values, tokens: float32 and int64 [n, most], the likeliest tokens, best first.
    """

    counts: dict[int, int]
    own: Tensor
    values: Tensor
    tokens: Tensor


@dataclass(frozen=True, slots=True)
class Choice:
    """Tokens chosen for the rows of one forward, on the logits' device.

    Attributes:
        tokens: int32[m]; 0 where the logits are not finite.
        finite: bool[m].
        logprobs: None if no row asked.
    """

    tokens: Tensor
    finite: Tensor
    logprobs: Logprobs | None

    def fetch(self) -> Callable[[], Chosen]:
        """Start copies to the host that do not block; on the CPU there is nothing to copy.

        Returns:
            What reads them. Call it once the stream has passed this point, on any thread.
        """
        tokens, finite, asked = _to_host(self.tokens), _to_host(self.finite), self.logprobs
        if asked is not None:
            asked = Logprobs(asked.counts, *map(_to_host, (asked.own, asked.values, asked.tokens)))

        def read() -> Chosen:
            failures = dict.fromkeys(np.flatnonzero(~finite.numpy()).tolist(), _NOT_FINITE)
            logprobs = _by_row(asked) if asked is not None else {}
            return Chosen(tokens.numpy(), {r: of for r, of in logprobs.items() if r not in failures}, failures)

        return read


def choose(logits: Tensor, samplers: Sequence[Sampler], slots: Rows, at: Rows, tokens: Tensor) -> Choice:
    """Choose one token for each row.

    Args:
        logits: [m, vocab], on any device.
        samplers, slots, at: of each row: how to choose, the request, the board position the token will go to.
        tokens: int32[slots, max_len] on the same device: every request's tokens, those before `at` are read.

    Returns:
        Tokens on the device. A row whose logits are not finite gets token 0 and a cleared flag.
    """
    best, picked = logits.max(-1)
    finite = best.abs() < torch.inf
    groups = _groups(samplers)
    asked = {row: s.params.logprobs for row, s in enumerate(samplers) if s.params.logprobs is not None}
    if groups or asked:
        sent = _Sent.upload(logits.device, groups, list(asked), samplers, slots, at)
        if groups:
            picked.index_copy_(0, sent.rows, _pick(logits, groups, samplers, sent, at, tokens))
    chosen = (picked * finite).int()
    return Choice(chosen, finite, _logprobs(logits, chosen, asked, sent.asked) if asked else None)


@dataclass(frozen=True, slots=True)
class _Sent:
    """What the device has to know.

    Attributes:
        rows, slots, ends, prompt_lens, seeds: int64[n], of the rows of every group, in order; a request's tokens are
            positions ``0 ... ends - 1`` of its slot.
        asked: int64, rows that want log-probabilities.
    """

    rows: Tensor
    slots: Tensor
    ends: Tensor
    prompt_lens: Tensor
    seeds: Tensor
    asked: Tensor

    @classmethod
    def upload(
        cls,
        device: torch.device,
        groups: list[list[int]],
        asked: list[int],
        samplers: Sequence[Sampler],
        slots: Rows,
        at: Rows,
    ) -> _Sent:
        rows = [row for group in groups for row in group]
        prompt_lens = [samplers[row].prompt_len for row in rows]
        seeds = np.array([samplers[row].seed % 2**64 for row in rows], np.uint64).view(np.int64)
        parts = (rows, slots[rows], at[rows], prompt_lens, seeds, asked)
        host = torch.from_numpy(np.concatenate([np.asarray(part, np.int64) for part in parts]))
        if device.type == "cuda":
            host = host.pin_memory()
        return cls(*torch.split(host.to(device, non_blocking=True), [len(part) for part in parts]))


def _groups(samplers: Sequence[Sampler]) -> list[list[int]]:
    """Rows that are not simply greedy, those that are processed alike together; sampled ones first."""
    alike: dict[tuple[float, ...], list[int]] = {}
    for row, sampler in enumerate(samplers):
        alike.setdefault(_processing(sampler.params), []).append(row)
    first = [(samplers[rows[0]].params, rows) for rows in alike.values()]
    sampled = [rows for params, rows in first if not params.greedy]
    return sampled + [rows for params, rows in first if params.greedy and penalised(params)]


def _pick(
    logits: Tensor, groups: list[list[int]], samplers: Sequence[Sampler], sent: _Sent, at: Rows, tokens: Tensor
) -> Tensor:
    """Token of each row in ``sent.rows``, int64[n]."""
    alike = len(groups[0]) == len(logits)
    scores = (logits if alike else logits.index_select(0, sent.rows)).float()
    sampled = sum(len(rows) for rows in groups if not samplers[rows[0]].params.greedy)
    noise = None
    if sampled:
        noise = gumbel(sent.seeds[:sampled], (sent.ends - sent.prompt_lens)[:sampled], logits.shape[1])
    picked, start = [], 0
    for rows in groups:
        params, span = samplers[rows[0]].params, slice(start, start + len(rows))
        history = None
        if penalised(params):
            longest = int(at[rows].max())
            history = History.read(tokens, longest, sent.slots[span], sent.prompt_lens[span], sent.ends[span])
        processed = process(params, history, scores[span])
        if noise is not None and not params.greedy:
            processed = processed + noise[span]
        picked.append(processed.argmax(-1))
        start = span.stop
    return torch.cat(picked)


def _logprobs(logits: Tensor, chosen: Tensor, counts: dict[int, int], rows: Tensor) -> Logprobs:
    logprobs = (logits if len(counts) == len(logits) else logits.index_select(0, rows)).float().log_softmax(-1)
    own = logprobs.gather(1, chosen.index_select(0, rows).long()[:, None])[:, 0]
    values, tokens = logprobs.topk(min(max(counts.values()), logits.shape[1]))
    return Logprobs(counts, own, values, tokens)


def _by_row(logprobs: Logprobs) -> dict[int, TokenLogprobs]:
    parts = zip(logprobs.own.tolist(), logprobs.tokens.tolist(), logprobs.values.tolist(), strict=True)
    return {
        row: TokenLogprobs(own, tuple(zip(tokens[:count], values[:count], strict=True)))
        for (row, count), (own, tokens, values) in zip(logprobs.counts.items(), parts, strict=True)
    }


def _to_host(tensor: Tensor) -> Tensor:
    if tensor.device.type == "cpu":
        return tensor
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)
