"""A lane's body that runs a model: takes segments of forwards, answers with sampled tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from smpart.errors import UsageError
from smpart.runtime.adapter import ModelAdapter
from smpart.runtime.batch import NO_ROWS, Batch, Sampler, Segment, StepResult
from smpart.runtime.board import Board
from smpart.runtime.packing import Packing
from smpart.runtime.pause import PausableForward
from smpart.runtime.sampler import choose

MAX_PAUSED = 8
"""Forwards one body keeps paused at most: each holds its activations."""


class ModelBody:
    """Runs segments of one model's forwards, on the thread that calls `run`.

    Args:
        memory: KV pages, one tensor a layer, [2, blocks, block_tokens, kv_heads, head_dim], in the model's own type.
        board: where tokens come from and go to, and the block tables.
    """

    def __init__(self, adapter: ModelAdapter, memory: Sequence[Tensor], board: Board) -> None:
        self.adapter = adapter
        self._memory = memory
        self._board = board
        self._tokens = torch.from_numpy(board.tokens)
        self._samplers: dict[int, Sampler] = {}
        self._paused: dict[int, tuple[PausableForward, Packing]] = {}
        _check_memory(adapter, memory, board)

    def run(self, payload: Any) -> StepResult:
        """Run one `Segment`.

        Raises:
            UsageError: it resumes a forward that is not paused here, or pauses one too many.
            Exception: what the forward raised; the forward is dropped and the body goes on.
        """
        segment: Segment = payload
        self._samplers.update(segment.samplers)
        for forward in segment.drop:
            self._abandon(forward)
        with torch.inference_mode():
            if segment.batch is not None and segment.layers is None:
                packing = self._pack(segment.batch)
                return self._sample(self.adapter.forward(self._memory, packing), packing)
            return self._advance(segment)

    def close(self) -> None:
        """Drop paused forwards. Call it on the thread that ran them."""
        for forward in list(self._paused):
            self._abandon(forward)

    def _advance(self, segment: Segment) -> StepResult:
        """Start or resume a forward that may pause."""
        if segment.batch is not None:
            if len(self._paused) >= MAX_PAUSED:
                raise UsageError(f"forward {segment.forward}: {MAX_PAUSED} forwards are paused here already")
            self._abandon(segment.forward)
            packing = self._pack(segment.batch)
            forward = PausableForward(lambda: self.adapter.forward(self._memory, packing))
        elif segment.forward in self._paused:
            forward, packing = self._paused.pop(segment.forward)
        else:
            raise UsageError(f"forward {segment.forward} is not paused here: it ended, failed or was abandoned")
        logits = forward.advance(segment.layers)
        if logits is not None:
            return self._sample(logits, packing)
        self._paused[segment.forward] = forward, packing
        return StepResult(False, NO_ROWS, NO_ROWS)

    def _pack(self, batch: Batch) -> Packing:
        return Packing(batch, self._board, self._memory[0].dtype)

    def _sample(self, logits: Tensor, packing: Packing) -> StepResult:
        slots, at = packing.slots, packing.at
        if not len(slots):
            return StepResult(True, NO_ROWS, NO_ROWS)
        samplers = [self._samplers[slot] for slot in slots.tolist()]
        chosen = choose(logits, samplers, slots, at, self._tokens).fetch()()
        kept = at < self._board.max_len  # a step run ahead of a request's end may sample past the last position
        self._board.tokens[slots[kept], at[kept]] = chosen.tokens[kept]
        return StepResult(
            True,
            slots,
            chosen.tokens,
            {int(slots[row]): value for row, value in chosen.logprobs.items()},
            {int(slots[row]): reason for row, reason in chosen.failures.items()},
        )

    def _abandon(self, number: int) -> None:
        forward, _ = self._paused.pop(number, (None, None))
        if forward is not None:
            forward.abandon()


def _check_memory(adapter: ModelAdapter, memory: Sequence[Tensor], board: Board) -> None:
    facts = adapter.facts
    wanted = (board.block_tokens, facts.kv_heads, facts.head_dim)
    if len(memory) != facts.layers or any(m.shape[2:] != wanted or m.dtype != facts.dtype for m in memory):
        raise UsageError(
            f"KV memory does not fit the model: it needs {facts.layers} layers of {facts.dtype} pages shaped "
            f"[2, blocks, {', '.join(map(str, wanted))}]"
        )
