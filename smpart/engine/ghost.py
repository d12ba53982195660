"""A body for virtual time: it computes nothing and answers at once; what it would cost is the lanes' business."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from smpart.partition import Side
from smpart.runtime.batch import NO_ROWS, Batch, Rows, Segment, StepResult


class GhostBody:
    """Answers every segment as a model would that always says token 1."""

    def __init__(self, side: Side) -> None:
        self._paused: dict[int, Batch] = {}
        self._last = StepResult(True, NO_ROWS, NO_ROWS)

    def run(self, payload: Segment) -> StepResult:
        """The `StepResult` of a segment, with made-up tokens."""
        for forward in payload.drop:
            self._paused.pop(forward, None)
        batch = payload.batch if payload.batch is not None else self._paused.pop(payload.forward)
        if payload.layers is not None:
            self._paused[payload.forward] = batch
            return StepResult(False, NO_ROWS, NO_ROWS)
        if not batch.chunks:
            if batch.decode_slots is not self._last.slots:  # else the same rows again: the same answer
                self._last = StepResult(True, batch.decode_slots, _ones(len(batch.decode_slots)))
            return self._last
        sampling = [chunk.slot for chunk in batch.chunks if chunk.sample]
        slots = np.concatenate([batch.decode_slots, np.asarray(sampling, dtype=np.int32)])
        return StepResult(True, slots, _ones(len(slots)))

    def close(self) -> None:
        """Nothing to free."""


@cache
def _ones(count: int) -> Rows:
    return np.ones(count, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class GhostBoard:
    """A board that keeps no tokens: in virtual time nobody reads them."""

    slots: int
    max_len: int

    def write_tokens(self, slot: int, prompt: Sequence[int], outputs: Sequence[int] = ()) -> None:
        """Nothing to write."""

    def append_blocks(self, slot: int, first: int, blocks: Sequence[int]) -> None:
        """Nothing to write."""
