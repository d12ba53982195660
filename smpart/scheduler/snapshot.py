"""What a policy sees when it decides: a read-only view, valid until it returns."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from smpart.partition import Shape, Side, Split
from smpart.predictor.estimate import Predictor
from smpart.scheduler.table import RequestTable

Rows = NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class ForwardView:
    """A prefill forward that has been started: launched, running or paused between layer groups.

    Attributes:
        rows: requests packed in it.
        lengths: tokens of each row's chunk.
        layers_left: decoder layers not yet launched (0: its last group is in flight).
        inflight: works of it that are launched and not complete.
        started: when its first group was launched.
    """

    id: int
    rows: tuple[int, ...]
    lengths: tuple[int, ...]
    shape: Shape
    layers_left: int
    inflight: int
    started: float


@dataclass(frozen=True, slots=True)
class LaneView:
    """One lane.

    Attributes:
        room: works that may still be launched on it now (0 when the queue is full).
        inflight: works launched and not complete.
        busy_until: when the launched works are predicted (mean) to be done; `Snapshot.now` if idle.
        shape: shape of the work last launched and not complete, or the empty shape.
    """

    room: int
    inflight: int
    busy_until: float
    shape: Shape


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state a plan is made from.

    Attributes:
        waiting: rows not admitted, in arrival order (a preempted row keeps its arrival number).
        prefilling: admitted rows with tokens left to compute and not part of a started forward.
        running: rows that can take a decode step now: KV up to date or launched on the decode lane, output
            limit not reached by what is launched, no prefill pending, not cancelled.
        forwards: started prefill forwards, oldest first.
        split: the current target; splits: all that exist.
        free_blocks: blocks free or evictable, less what launched works still need.
        free_slots: requests that may still be admitted.
        layers: decoder layers of the model.
        max_paused: started and unfinished prefill forwards allowed at once.
        overlapping: splits besides whose sides share units, where the lanes can (`Lanes.overlapping`).
        decode_blocks: blocks free or evictable on the device that decodes, where each lane has its own (`free_blocks`
            are then those of the device that prefills); None: both lanes see one memory.
    """

    now: float
    table: RequestTable
    waiting: Rows
    prefilling: Rows
    running: Rows
    forwards: tuple[ForwardView, ...]
    prefill_lane: LaneView
    decode_lane: LaneView
    split: Split
    splits: tuple[Split, ...]
    free_blocks: int
    block_tokens: int
    free_slots: int
    layers: int
    max_paused: int
    predictor: Predictor
    overlapping: tuple[Split, ...] = ()
    decode_blocks: int | None = None

    def lane(self, side: Side) -> LaneView:
        """The lane of one side."""
        return self.prefill_lane if side is Side.PREFILL else self.decode_lane

    @property
    def units(self) -> int:
        """Units of the whole device."""
        return self.splits[0].total
