"""Two schedulers that move the line by estimated TTFT and TPOT of everybody in the system (Bullet).

Source: Bullet (arXiv 2504.19516, camera-ready) sections 3.2 to 3.4; `server_args.py`, `shared_mng.py` and
`tp_worker.py` of its code. Simplified: the engine's predictor stands for the paper's estimator, so that only the rule
differs; both schedulers decide together, at each layer group and step; shares never overlap; near the last layer decode
is not given units ahead of time. A batch takes prompts up to the code's 1,664 tokens, where the paper says "until the
arithmetic intensity peaks". Chosen where the paper is silent (the three resizings, the layers of a group, when decode
is suspended):

* shrink decode: the smallest decode side whose predicted step holds the TPOT objective;
* shrink prefill: the same, but no smaller than decode has now;
* balance: the split that minimises the larger of TTFT and TPOT over their objectives;
* suspend decode, when TTFTs fail even so: as long as every reader's mean TPOT holds with one step more;
* a layer group is four layers.

Waiting prompts are taken by least work unless that makes one late that arrival order would not. Under a stream of
short prompts a long one that is late already can starve: that is the rule's own.
"""

from __future__ import annotations

import math

import numpy as np

from smpart.partition import Shape, Split
from smpart.predictor.estimate import NOTHING
from smpart.scheduler import memory
from smpart.scheduler.costs import Costs, Floats
from smpart.scheduler.memory import Fit
from smpart.scheduler.pair import TwoLanes, Work, nearest, pack, proper
from smpart.scheduler.plan import Plan
from smpart.scheduler.registry import Setup, register
from smpart.scheduler.snapshot import Rows, Snapshot

BATCH_TOKENS = 1664
GROUP_LAYERS = 4
QUANTILE = 0.9


@register("bullet")
class Bullet(TwoLanes):
    """``bullet``."""

    pack_tokens = BATCH_TOKENS

    def __init__(self, setup: Setup) -> None:
        setup.nothing("bullet")
        self.name = "bullet"
        self._ttft, self._tpot = setup.slo.ttft_ms / 1e3, setup.slo.tpot_ms / 1e3
        self._costs = Costs()
        self._all: tuple[Split, ...] = ()
        self._proper: tuple[Split, ...] = ()
        self._split = Split(0, 1)
        if setup.splits:
            proper(setup.splits)

    def plan(self, snapshot: Snapshot) -> Plan:
        """A step and a layer group."""
        self._costs.tick(snapshot.predictor, snapshot.units)
        return super().plan(snapshot)

    def split_for(self, snapshot: Snapshot, step: Shape, work: Work) -> Split:
        """One of the three resizings, or all to prefill."""
        if snapshot.splits != self._all:
            self._all, self._proper = snapshot.splits, proper(snapshot.splits)
            self._split = nearest(self._proper, 0.5)
        sides = snapshot.predictor.predict_splits(step, work.shape, self._proper)
        ttfts = self._ttfts(snapshot, work, sides.head)
        satisfied = ttfts <= self._ttft
        held = self._proper.index(self._split)
        tpot = float(_p90(self._tpots(snapshot, sides.step[held])))
        holds = np.flatnonzero(sides.step <= self._tpot)
        smallest = int(holds[0]) if holds.size else len(self._proper) - 1
        if not satisfied[held] and tpot > self._tpot:
            place = int(np.maximum(ttfts / self._ttft, sides.step / self._tpot).argmin())
        elif tpot <= self._tpot:
            place = smallest
        else:
            place = max(smallest, held)
        overload = work.left and not satisfied[held] and not satisfied[place]
        self._split = self._proper[place]
        if overload and self._tpots(snapshot, sides.step[place]).max() <= self._tpot:
            return Split(snapshot.units, 0)
        return self._split

    def layers(self, snapshot: Snapshot, step: Shape, work: Work, split: Split) -> int | None:
        """Four."""
        return None if work.left <= GROUP_LAYERS else GROUP_LAYERS

    def pack(self, snapshot: Snapshot, fit: Fit) -> Work:
        """Prompts by least work, unless that breaks a TTFT that can be kept."""
        return pack(snapshot, fit, self._order(snapshot, snapshot.waiting), self.pack_tokens)

    def _order(self, snapshot: Snapshot, waiting: Rows) -> Rows:
        if len(waiting) < 2:
            return waiting
        work = self._work(snapshot, waiting)
        order = np.argsort(work, kind="stable")
        due = snapshot.table.arrival.take(waiting) + self._ttft - snapshot.now
        late = np.cumsum(work[order]) > due[order]
        breaks = late & (np.cumsum(work) <= due)[order]
        return waiting if breaks.any() else waiting[order]

    def _work(self, snapshot: Snapshot, waiting: Rows) -> Floats:
        """Seconds of each prompt, alone on the whole device."""
        return self._costs.work(snapshot.table.known.take(waiting) - memory.first_token(snapshot, waiting))

    def _ttfts(self, snapshot: Snapshot, work: Work, heads: Floats) -> Floats:
        """Estimated TTFT on each split: the worst of the batch in flight, or, without one, of 90 % of those who wait.

        Who waits is served after the batch, in order of arrival, at its speed.

        Args:
            heads: [splits] predicted seconds of the whole batch.
        """
        table, batch = snapshot.table, list(work.rows)
        left = work.left + 0.5 * bool(work.forward and work.forward.inflight)
        share = min(1.0, left / snapshot.layers)
        if work.forward:
            worst: Floats = snapshot.now - float(table.arrival[batch].min()) + share * heads
            return worst
        rest = snapshot.waiting[~np.isin(snapshot.waiting, batch)]
        whole = max(1e-9, snapshot.predictor.predict(work.shape, snapshot.units, NOTHING).mean)
        shares = np.concatenate((np.full(len(batch), share), share + np.cumsum(self._work(snapshot, rest)) / whole))
        waited = snapshot.now - table.arrival[np.concatenate((np.array(batch, dtype=np.intp), rest))]
        return _p90(waited[:, None] + shares[:, None] * heads)

    def _tpots(self, snapshot: Snapshot, step: float) -> Floats:
        """Mean TPOT of each reader once the next step, of `step` seconds, has ended."""
        table, rows = snapshot.table, snapshot.running
        rows = rows[np.isfinite(table.first_token.take(rows))]
        if not rows.size:
            return np.array([step])
        ends = max(snapshot.now, snapshot.decode_lane.busy_until) + step
        gaps = np.maximum(table.outputs.take(rows) + table.ahead.take(rows), 1)
        tpots: Floats = (ends - table.first_token.take(rows)) / gaps
        return tpots


def _p90(values: Floats) -> Floats:
    """The 90th percentile over the first axis, by nearest rank."""
    rank = math.ceil(QUANTILE * len(values)) - 1
    found: Floats = np.partition(values, rank, axis=0)[rank]
    return found
