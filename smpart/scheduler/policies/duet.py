"""One lane while its hybrid step holds the TPOT objective, two lanes for one iteration when it does not (DuetServe).

Source: two public summaries of DuetServe (arXiv 2511.04791); the paper itself was not at hand. Simplified: the engine's
predictor stands for the roofline model, so that only the rule differs; the look-ahead steps are launched one by one, so
that a request that ends among them wastes none, and their KV blocks are not set aside beforehand. Chosen where the
summaries are silent: the bound is the TPOT objective, at most 16 look-ahead steps, and where no split holds the bound
decode has the largest side.

An iteration on two lanes ends when its prefill and its steps have; only then the next batch is built (as `chunked`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from smpart.partition import Shape, Split
from smpart.predictor.estimate import NOTHING
from smpart.scheduler import memory
from smpart.scheduler.pair import proper, step_shape
from smpart.scheduler.plan import Piece, Plan, StartPrefill, Step
from smpart.scheduler.policies.chunked import Chunked
from smpart.scheduler.registry import Setup, register
from smpart.scheduler.snapshot import Rows, Snapshot

BUDGET = 8192
"""Tokens of a batch (vLLM's default on large devices)."""
MOST_STEPS = 16


class _Iteration(NamedTuple):
    """An iteration on two lanes: its split, its decode steps, and its readers as they were at its start."""

    split: Split
    steps: int
    rows: Rows
    seqs: NDArray[np.int64]
    computed: NDArray[np.int32]

    def still(self, snapshot: Snapshot) -> NDArray[np.bool_]:
        """Which rows still are those readers."""
        table = snapshot.table
        kept: NDArray[np.bool_] = (table.seq[self.rows] == self.seqs) & np.isin(self.rows, snapshot.running)
        return kept

    def launched(self, snapshot: Snapshot) -> int:
        """Steps launched; all, if no reader is left."""
        kept = self.still(snapshot)
        if not kept.any():
            return self.steps
        return int((snapshot.table.computed[self.rows] - self.computed)[kept].max())


@register("duet")
class Duet:
    """``duet[:budget]``: at most `budget` tokens a batch."""

    def __init__(self, setup: Setup) -> None:
        self._tau = setup.slo.tpot_ms / 1e3
        budget = setup.whole("duet", BUDGET)
        self._batches = Chunked(replace(setup, argument=str(budget)))
        self.name = f"duet:{budget}" if setup.argument else "duet"
        self._iteration: _Iteration | None = None

    def plan(self, snapshot: Snapshot) -> Plan:
        """The rest of an iteration on two lanes, or a new batch on one or two."""
        iteration = self._iteration
        if iteration:
            if snapshot.forwards or 0 < iteration.launched(snapshot) < iteration.steps:
                return self._go_on(snapshot, iteration)
            self._iteration = None
        whole = self._batches.plan(snapshot)
        step = whole.step
        if not step or not step.rows or not step.pieces:
            return whole
        decode = step_shape(snapshot, np.asarray(step.rows, dtype=np.intp))
        prefill = Shape.prefill((piece.length, _start(snapshot, piece)) for piece in step.pieces)
        if snapshot.predictor.predict(decode.join(prefill), snapshot.units, NOTHING).mean <= self._tau:
            return whole
        if snapshot.decode_lane.inflight or snapshot.prefill_lane.inflight:
            return Plan(whole.split, preempt=whole.preempt, reason="waits for the batch in flight")
        return self._split(snapshot, whole.preempt, step, decode, prefill)

    def _split(self, snapshot: Snapshot, preempt: tuple[int, ...], step: Step, decode: Shape, prefill: Shape) -> Plan:
        split, steps = self._choose(snapshot, decode, prefill)
        rows, table = np.asarray(step.rows, dtype=np.intp), snapshot.table
        self._iteration = _Iteration(split, steps, rows, table.seq[rows], table.computed[rows])
        reason = f"{split}: {steps} steps of {len(rows)} rows beside {prefill.prefill_tokens} tokens"
        return Plan(split, StartPrefill(step.pieces), Step(step.rows), preempt=preempt, reason=reason)

    def _choose(self, snapshot: Snapshot, decode: Shape, prefill: Shape) -> tuple[Split, int]:
        """The split and the number of steps with most tokens a second, of those whose steps hold the bound."""
        splits = proper(snapshot.splits)
        step, _, head, _ = snapshot.predictor.predict_splits(decode, prefill, splits)
        counts = np.arange(1, MOST_STEPS + 1)
        tokens = counts * decode.decode_batch + prefill.prefill_tokens
        rate = tokens / np.maximum(counts * step[:, None], head[:, None])
        rate[step > self._tau] = 0.0
        place, best = divmod(int(rate.argmax()), MOST_STEPS)
        if rate[place, best] == 0.0:
            place = len(splits) - 1
            best = min(MOST_STEPS, max(1, int(head[-1] / step[-1]))) - 1
        return splits[place], best + 1

    def _go_on(self, snapshot: Snapshot, iteration: _Iteration) -> Plan:
        fit = memory.fit_decode(snapshot)
        rows = fit.rows[np.isin(fit.rows, iteration.rows[iteration.still(snapshot)])]
        launched = iteration.launched(snapshot)
        steps = launched < iteration.steps and snapshot.decode_lane.room and rows.size
        reason = f"{iteration.split}: {launched} of {iteration.steps} steps"
        step = Step(tuple(rows.tolist())) if steps else None
        return Plan(iteration.split, step=step, preempt=fit.preempt, reason=reason)


def _start(snapshot: Snapshot, piece: Piece) -> int:
    """The first token that a piece computes."""
    table = snapshot.table
    if table.slot[piece.row] >= 0:
        return int(table.computed[piece.row])
    return int(memory.first_token(snapshot, np.array([piece.row]))[0])
