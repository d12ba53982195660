"""The smallest decode partition whose worst step holds the TPOT objective; prefill has the rest (MuxWise).

Source: MuxWise (arXiv 2504.14489, camera-ready) sections 3.2 to 3.4; its preprint is Drift. Simplified: the engine's
predictor stands for the paper's fitted formulas, and its upper bound beside the prefill for their solo latency times
the largest slowdown seen, so that only the rule differs; prefill batches are formed as in `pdmux`. Chosen where the
paper is silent: if no partition holds, decode has the largest and prefill goes on; without decode a layer group lasts
the TPOT objective, so that a batch that preempts need not wait longer; deadlines are the requests' own.

Decode partitions step by 16 SMs (20, 36, ... on 132; 12, 28, ... on 108). On devices without such splits (cores of a
CPU) all are candidates.
"""

from __future__ import annotations

import math

from smpart.partition import Shape, Split
from smpart.predictor.estimate import NOTHING
from smpart.scheduler.memory import Fit
from smpart.scheduler.pair import TwoLanes, Work, proper
from smpart.scheduler.registry import Setup, register
from smpart.scheduler.snapshot import ForwardView, Snapshot

STEP = 16
BATCH_TOKENS = 16384
"""Tokens of a prefill batch (SGLang's `max_prefill_tokens`)."""


@register("muxwise")
class Muxwise(TwoLanes):
    """``muxwise``."""

    pack_tokens = BATCH_TOKENS

    def __init__(self, setup: Setup) -> None:
        setup.nothing("muxwise")
        self.name = "muxwise"
        self._tpot = setup.slo.tpot_ms / 1e3
        self._all: tuple[Split, ...] = ()
        self._ladder: tuple[Split, ...] = ()
        self._batch: tuple[int, ...] = ()
        self._split = Split(0, 1)
        if setup.splits:
            proper(setup.splits)

    def split_for(self, snapshot: Snapshot, step: Shape, work: Work) -> Split:
        """Chosen anew when a decode step has ended and when the prefill batch changes."""
        if snapshot.splits != self._all:
            self._all, self._ladder, self._batch = snapshot.splits, ladder(snapshot.splits), ()
        batch = work.batch(snapshot)
        if batch != self._batch or snapshot.decode_lane.room:
            self._batch = batch
            self._split = self._smallest(snapshot, step, work)
        return self._split

    def layers(self, snapshot: Snapshot, step: Shape, work: Work, split: Split) -> int | None:
        """As many as last one decode step."""
        predict = snapshot.predictor.predict
        lasts = predict(step, split.decode, work.shape).upper if split.decode else self._tpot
        layers = math.ceil(lasts * snapshot.layers / predict(work.shape, split.prefill).mean)
        return None if layers >= work.left else max(1, layers)

    def work(self, snapshot: Snapshot, fit: Fit) -> Work:
        """The next group, unless a batch that waits may preempt it."""
        work = super().work(snapshot, fit)
        alone = len(snapshot.forwards) == 1 and work.left
        if alone and snapshot.max_paused > 1 and snapshot.prefill_lane.room:  # a batch that preempts is not preempted
            fresh = self.pack(snapshot, fit)
            if fresh.pieces and self._may_preempt(snapshot, fresh, snapshot.forwards[0]):
                return fresh
        return work

    def _may_preempt(self, snapshot: Snapshot, fresh: Work, victim: ForwardView) -> bool:
        """Whether waiting would break the batch's TTFT, going first would not, and the victim keeps its own."""
        units, due = snapshot.split.prefill or snapshot.units, snapshot.table.ttft_deadline
        takes = snapshot.predictor.predict(fresh.shape, units, NOTHING).mean
        left = snapshot.predictor.predict(victim.shape, units, NOTHING).mean * victim.layers_left / snapshot.layers
        mine, theirs = float(due[list(fresh.rows)].min()), float(due[list(victim.rows)].min())
        both = snapshot.now + takes + left
        return snapshot.now + takes <= mine < both <= theirs

    def _smallest(self, snapshot: Snapshot, step: Shape, work: Work) -> Split:
        worst = snapshot.predictor.predict_splits(step, work.shape, self._ladder).step_upper
        holds = (worst <= self._tpot).nonzero()[0]
        return self._ladder[int(holds[0])] if holds.size else self._ladder[-1]


def ladder(splits: tuple[Split, ...]) -> tuple[Split, ...]:
    """The paper's partitions, the smallest decode side first."""
    there = proper(splits)
    return tuple(split for split in there if split.prefill % STEP == 0) or there
