"""Caps for each phase, raised when finished requests missed its objective (semi-PD).

Source: semi-PD's paper sections 4.3 and 5, and its code (branch `distserve_base`, `single_stage_engine.py`). The two
differ; this is the code's rule with its fitted curves, every `WINDOW` finished requests. Caps may sum to more than
100: where lanes can share units, so they do here. Simplified: on lanes that cannot (`green`, `mps`) the caps are
normalised to shares of the device (100/100: half each), and a phase alone has all of it, which is logged. Prefill runs
in no layer groups, first come, first served. New caps take effect `SWITCH_S` later, for a new worker is prepared aside
meanwhile. Chosen where both are silent: that delay; when one phase is at 100 already, the other is lowered up to three
times.

The curves are kept as they are, the waiting curve's rise towards 100 included.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from smpart.errors import UsageError
from smpart.partition import Shape, Split
from smpart.scheduler.pair import TwoLanes, Work, nearest, proper
from smpart.scheduler.plan import Plan
from smpart.scheduler.registry import Setup, register
from smpart.scheduler.slo import SLO
from smpart.scheduler.snapshot import Snapshot
from smpart.scheduler.table import State

logger = logging.getLogger(__name__)

WINDOW = 400
STEP, MOST_STEPS = 2, 3
FLOOR, FULL = 80, 100
MARGIN = 1.1
"""What a measured TPOT is multiplied with before it is held against its objective."""
SWITCH_S = 1.5
QUANTILE = 0.9


class Caps(NamedTuple):
    """Percent of the device each phase may use."""

    prefill: int
    decode: int


class Measured(NamedTuple):
    """What finished requests saw, 90th percentiles, seconds.

    Attributes:
        waiting, execution: the parts of `ttft`: until prefill began, and from then on.
    """

    ttft: float
    waiting: float
    execution: float
    tpot: float


def tpot_curve(cap: float) -> float:
    """TPOT under a cap, in units of its own (the code's fit).

    >>> round(98 * tpot_curve(82) / tpot_curve(80), 2)
    96.45
    """
    return 0.6099 * FULL / cap + 0.4153


def execution_curve(cap: float) -> float:
    """The execution part of TTFT under a cap (the code's fit)."""
    return 0.7324 * FULL / cap + 0.3185


def waiting_curve(cap: float) -> float:
    """The waiting part of TTFT under a cap (the code's fit).

    >>> round(waiting_curve(90), 3), round(waiting_curve(99), 3)
    (1.097, 1.115)
    """
    ratio = FULL / cap
    return 1.4046 * ratio * ratio - 3.1594 * ratio + 2.8735


def adjust(caps: Caps, seen: Measured, slo: SLO, floor: int = FLOOR) -> Caps:
    """The next caps, none of them lowered below `floor`."""
    ttft_goal, tpot_goal = slo.ttft_ms / 1e3, slo.tpot_ms / 1e3

    def ttft_holds(cap: int) -> bool:
        waiting = seen.waiting * waiting_curve(cap) / waiting_curve(caps.prefill)
        return waiting + seen.execution * execution_curve(cap) / execution_curve(caps.prefill) <= ttft_goal

    def tpot_holds(cap: int) -> bool:
        return seen.tpot * tpot_curve(cap) / tpot_curve(caps.decode) <= tpot_goal

    ttft_good, tpot_good = seen.ttft <= ttft_goal, MARGIN * seen.tpot <= tpot_goal
    if ttft_good and tpot_good:
        return caps
    prefill, decode = caps
    if not ttft_good and not tpot_good:
        return Caps(FULL, FULL) if max(caps) < FULL else caps
    for _ in range(MOST_STEPS):
        if not ttft_good:
            prefill, decode, done = _raise(prefill, decode, ttft_holds, tpot_holds, floor)
        else:
            decode, prefill, done = _raise(decode, prefill, tpot_holds, ttft_holds, floor)
        if done:
            break
    return Caps(prefill, decode)


def _raise(
    own: int, other: int, own_holds: Callable[[int], bool], other_holds: Callable[[int], bool], floor: int
) -> tuple[int, int, bool]:
    """One step in favour of the phase that missed: both caps, and whether that is expected to do."""
    if own < FULL:
        own = min(FULL, own + STEP)
        return own, other, own_holds(own)
    if other - STEP >= floor and other_holds(other - STEP):
        return own, other - STEP, False
    return own, other, True


def capped(caps: Caps, overlapping: Iterable[Split], units: int) -> Split:
    """The split whose sides are most nearly what caps allow on a device of `units` units.

    >>> str(capped(Caps(100, 80), [Split(10, 10), Split(10, 8), Split(8, 10)], 10))
    '10/8'
    """
    prefill, decode = (units * cap / FULL for cap in caps)
    return min(overlapping, key=lambda split: (abs(split.prefill - prefill) + abs(split.decode - decode), split))


class Finished:
    """What finished requests saw, gathered from snapshots.

    A request whose row was taken again before it was looked at counts as it was last seen: only one that ends when the
    system is empty.
    """

    def __init__(self) -> None:
        self.clear()
        self._rows = np.zeros(0, dtype=np.intp)
        self._seqs = np.zeros(0, dtype=np.int64)
        self._arrival = self._begun = self._first = self._last = np.zeros(0)
        self._outputs = np.zeros(0, dtype=np.int32)

    def __len__(self) -> int:
        return len(self._waiting)

    def clear(self) -> None:
        """Forget those that have finished."""
        self._waiting: list[float] = []
        self._execution: list[float] = []
        self._tpot: list[float] = []

    def measured(self) -> Measured:
        """The quantiles of what is there; of one-token answers there is no TPOT."""
        waiting, execution, tpot = np.array(self._waiting), np.array(self._execution), np.array(self._tpot)
        tpot = tpot[np.isfinite(tpot)]
        parts = (waiting + execution, waiting, execution, tpot if tpot.size else np.zeros(1))
        return Measured(*(float(np.quantile(part, QUANTILE)) for part in parts))

    def look(self, snapshot: Snapshot) -> None:
        """Note who began, who got on and who is gone since the last look."""
        table = snapshot.table
        same = table.seq[self._rows] == self._seqs
        self._first = np.where(same, table.first_token[self._rows], self._first)
        self._last = np.where(same, table.last_token[self._rows], self._last)
        self._outputs = np.where(same, table.outputs[self._rows], self._outputs)
        stays = same & (table.state[self._rows] != State.FREE)
        self._note(~stays & np.isfinite(self._first))
        admitted = np.flatnonzero((table.slot >= 0) & (table.state != State.FREE))
        fresh = admitted[~np.isin(table.seq[admitted], self._seqs[stays])]
        self._rows = np.concatenate((self._rows[stays], fresh))
        self._seqs = np.concatenate((self._seqs[stays], table.seq[fresh]))
        self._arrival = np.concatenate((self._arrival[stays], table.arrival[fresh]))
        self._begun = np.concatenate((self._begun[stays], np.full(len(fresh), snapshot.now)))
        self._first = np.concatenate((self._first[stays], table.first_token[fresh]))
        self._last = np.concatenate((self._last[stays], table.last_token[fresh]))
        self._outputs = np.concatenate((self._outputs[stays], table.outputs[fresh]))

    def _note(self, gone: NDArray[np.bool_]) -> None:
        first, outputs = self._first[gone], self._outputs[gone]
        begun = np.minimum(self._begun[gone], first)
        self._waiting += (begun - self._arrival[gone]).tolist()
        self._execution += (first - begun).tolist()
        gaps = np.where(outputs > 1, outputs - 1, np.nan)
        self._tpot += ((self._last[gone] - first) / gaps).tolist()


@register("semipd")
class SemiPD(TwoLanes):
    """``semipd[:floor]``: no cap goes below `floor` percent.

    Attributes:
        caps: decided last.
    """

    steady = False  # it measures at each decision, and moves the line when a moment has come

    def __init__(self, setup: Setup) -> None:
        self._floor = setup.whole("semipd", FLOOR)
        if self._floor > FULL:
            raise UsageError(f"policy semipd:{self._floor}: a cap is at most {FULL} percent")
        self.name = f"semipd:{self._floor}" if setup.argument else "semipd"
        self._slo = setup.slo
        self._finished = Finished()
        self._all: tuple[Split, ...] = ()
        self._overlapping: tuple[Split, ...] = ()
        self._split = self._next = Split(0, 1)
        self._from = 0.0
        self.caps = Caps(FULL, FULL)
        if setup.splits and not setup.overlapping:
            proper(setup.splits)
            logger.warning("policy semipd: these lanes cannot share units; its caps become shares of the device")

    def plan(self, snapshot: Snapshot) -> Plan:
        """A step and a whole prefill."""
        if (snapshot.splits, snapshot.overlapping) != (self._all, self._overlapping):
            self._all, self._overlapping = snapshot.splits, snapshot.overlapping
            self._split = self._next = self._nearest()
        self._finished.look(snapshot)
        if len(self._finished) >= WINDOW:
            self._decide(snapshot.now)
        if snapshot.now >= self._from:
            self._split = self._next
        return super().plan(snapshot)

    def split_for(self, snapshot: Snapshot, step: Shape, work: Work) -> Split:
        """The caps, or their shares."""
        return self._split

    def alone(self, snapshot: Snapshot, step: Shape, work: Work) -> Split:
        """The caps; with mere shares, everything."""
        return self._split if self._overlapping else super().alone(snapshot, step, work)

    def layers(self, snapshot: Snapshot, step: Shape, work: Work, split: Split) -> int | None:
        """All."""
        return None

    def _decide(self, now: float) -> None:
        caps = adjust(self.caps, self._finished.measured(), self._slo, self._floor)
        self._finished.clear()
        if caps != self.caps:
            self.caps = caps
            self._next, self._from = self._nearest(), now + SWITCH_S

    def _nearest(self) -> Split:
        if not self._overlapping:
            return nearest(proper(self._all), self.caps.decode / sum(self.caps))
        return capped(self.caps, self._overlapping, self._all[0].total)
