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
        steps = [snapshot.predictor.predict(step, split.decode, work.shape).mean for split in self._proper]
        heads = [snapshot.predictor.predict(work.shape, split.prefill, step).mean for split in self._proper]
        held = self._proper.index(self._split)
        tpot = float(np.quantile(self._tpots(snapshot, steps[held]), QUANTILE))
        satisfied = self._satisfied(snapshot, work, heads[held])
        smallest = next((place for place, seconds in enumerate(steps) if seconds <= self._tpot), len(steps) - 1)
        if not satisfied and tpot > self._tpot:
            place = self._balanced(snapshot, work, steps, heads)
        elif tpot <= self._tpot:
            place = smallest
        else:
            place = max(smallest, held)
        self._split = self._proper[place]
        overload = work.left and not satisfied and not self._satisfied(snapshot, work, heads[place])
        if overload and self._tpots(snapshot, steps[place]).max() <= self._tpot:
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

    def _satisfied(self, snapshot: Snapshot, work: Work, head: float) -> bool:
        """Whether TTFTs hold: each of the batch in flight, or, without one, 90 % of the batch and of those who wait.

        Args:
            head: predicted seconds of the whole batch on the present split.
        """
        ttfts = self._ttfts(snapshot, work, head)
        if work.forward:
            return float(ttfts[: len(work.rows)].max()) <= self._ttft
        return float(np.quantile(ttfts, QUANTILE)) <= self._ttft

    def _ttfts(self, snapshot: Snapshot, work: Work, head: float) -> Floats:
        """Estimated TTFTs of the batch's rows, then of those who wait, served after it in order at its speed."""
        table, layers = snapshot.table, snapshot.layers
        left = work.left + 0.5 * bool(work.forward and work.forward.inflight)
        ends = snapshot.now + head * min(1.0, left / layers)
        batch = list(work.rows)
        rest = snapshot.waiting[~np.isin(snapshot.waiting, batch)]
        speed = head / max(1e-9, snapshot.predictor.predict(work.shape, snapshot.units, NOTHING).mean)
        done = ends + np.cumsum(self._work(snapshot, rest)) * speed if rest.size else np.zeros(0)
        ttfts: Floats = np.concatenate((ends - table.arrival[batch], done - table.arrival[rest]))
        return ttfts

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

    def _balanced(self, snapshot: Snapshot, work: Work, steps: list[float], heads: list[float]) -> int:
        def worse(place: int) -> float:
            ttft = float(np.quantile(self._ttfts(snapshot, work, heads[place]), QUANTILE))
            return max(ttft / self._ttft, steps[place] / self._tpot)

        return min(range(len(steps)), key=worse)
