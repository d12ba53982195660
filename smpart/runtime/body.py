"""A lane's body that runs a model: takes segments of forwards, answers with sampled tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from smpart.errors import UsageError
from smpart.runtime.batch import NO_ROWS, Batch, Sampler, Segment, StepResult
from smpart.runtime.feed import Feed
from smpart.runtime.packing import Packed
from smpart.runtime.pause import PausableForward
from smpart.runtime.sampler import choose

MAX_PAUSED = 8
"""Forwards one body keeps paused at most: each holds its activations."""

Reader = Callable[[], StepResult]


class ModelBody:
    """Runs segments of one model's forwards, on the thread that calls `run` or `enqueue`.

    On a device `enqueue` only queues: nothing in it waits for the device or reads from it.
    """

    def __init__(self, feed: Feed) -> None:
        self._feed = feed
        self._samplers: dict[int, Sampler] = {}
        self._paused: dict[int, tuple[PausableForward, Packed]] = {}

    def run(self, payload: Any) -> StepResult:
        """Run one `Segment` to its end. Raises as `enqueue` does."""
        return self.enqueue(payload, None)()

    def enqueue(self, payload: Any, place: Any) -> Reader:
        """Queue one `Segment` where the lane is; what reads its result once it is over.

        Raises:
            UsageError: it resumes a forward that is not paused here, or pauses one too many; or it has no rows.
            Exception: what the forward raised; the forward is dropped and the body goes on.
        """
        segment: Segment = payload
        self._samplers.update(segment.samplers)  # first: whoever sent them takes them for known from now on
        if segment.batch is not None:
            _require_rows(segment.batch)
        with self._feed.at(place), torch.inference_mode():
            for forward in segment.drop:
                self._abandon(forward)
            if segment.batch is not None and segment.layers is None:
                packing, logits = self._feed.whole(segment.batch)
                return self._sample(logits, packing)
            return self._advance(segment)

    def close(self) -> None:
        """Drop paused forwards. Call it on the thread that ran them."""
        for forward in list(self._paused):
            self._abandon(forward)

    def _advance(self, segment: Segment) -> Reader:
        """Start or resume a forward that may pause."""
        if segment.batch is not None:
            if len(self._paused) >= MAX_PAUSED:
                raise UsageError(f"forward {segment.forward}: {MAX_PAUSED} forwards are paused here already")
            self._abandon(segment.forward)
            packing = self._feed.pack(segment.batch)
            forward = PausableForward(lambda: self._feed.forward(packing))
        elif segment.forward in self._paused:
            forward, packing = self._paused.pop(segment.forward)
        else:
            raise UsageError(f"forward {segment.forward} is not paused here: it ended, failed or was abandoned")
        logits = forward.advance(segment.layers)
        if logits is not None:
            return self._sample(logits, packing)
        self._paused[segment.forward] = forward, packing
        return lambda: StepResult(False, NO_ROWS, NO_ROWS)

    def _sample(self, logits: Tensor, packing: Packed) -> Reader:
        slots, at = packing.slots, packing.at
        if not len(slots):
            return lambda: StepResult(True, NO_ROWS, NO_ROWS)
        samplers = [self._samplers[slot] for slot in slots.tolist()]
        choice = choose(logits, samplers, slots, at, self._feed.tokens)
        self._feed.store(packing, choice.tokens)
        fetched = choice.fetch()

        def read() -> StepResult:
            chosen = fetched()
            return StepResult(
                True,
                slots,
                chosen.tokens,
                {int(slots[row]): value for row, value in chosen.logprobs.items()},
                {int(slots[row]): reason for row, reason in chosen.failures.items()},
            )

        return read

    def _abandon(self, number: int) -> None:
        forward, _ = self._paused.pop(number, (None, None))
        if forward is not None:
            forward.abandon()


def _require_rows(batch: Batch) -> None:
    if not len(batch.decode_slots) and not batch.chunks:
        raise UsageError("a forward without rows: give it decode rows or chunks")
    if any(chunk.length < 1 for chunk in batch.chunks):
        raise UsageError("a forward with an empty chunk: give each at least one token")
