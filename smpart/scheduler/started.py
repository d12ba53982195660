"""What is known of the forwards that were started: what is left of them, how long they stood still, who starves."""

from __future__ import annotations

import math

from smpart.scheduler.costs import Costs
from smpart.scheduler.snapshot import ForwardView, Snapshot

PAUSE = 1.0
"""TTFT objectives that a started forward may stand still while others pass it."""
STARVE = 2.0
"""TTFT objectives that prefill as a whole may go without a token."""


class Started:
    """Of one policy.

    Args:
        costs: what a token takes.
        ttft: the objective in seconds.
    """

    def __init__(self, costs: Costs, ttft: float) -> None:
        self._costs, self._ttft = costs, ttft
        self._active: dict[int, float] = {}
        self._fed = -math.inf

    def note(self, snapshot: Snapshot, waits: bool) -> None:
        """Remember when each started forward, and prefill as a whole, was last seen to get on.

        Args:
            waits: whether a new forward could be started.
        """
        now = snapshot.now
        for forward in snapshot.forwards:
            if forward.inflight or forward.id not in self._active:
                self._active[forward.id] = now
        if len(self._active) > 4 * snapshot.max_paused:
            there = {forward.id for forward in snapshot.forwards}
            self._active = {number: since for number, since in self._active.items() if number in there}
        idle = not waits and not snapshot.forwards
        busy = snapshot.prefill_lane.inflight or snapshot.decode_lane.shape.prefill_tokens
        if self._fed == -math.inf or idle or busy:
            self._fed = now

    def fed(self, now: float) -> None:
        """Prefill is about to get on: where it has the device to itself nothing is under way when plans are made."""
        self._fed = now

    def resumed(self, forward: ForwardView, now: float) -> None:
        """So is a started forward."""
        self._active[forward.id] = self._fed = now

    def nobody_can_start(self) -> None:
        """Nobody can starve before the next decision."""
        self._fed = -math.inf

    def starving(self, now: float) -> bool:
        """Whether prefill as a whole has gone without for too long."""
        return now - self._fed > STARVE * self._ttft

    def overdue(self, snapshot: Snapshot, paused: list[ForwardView]) -> ForwardView | None:
        """The forward paused longest, if that is too long."""
        late = min(paused, key=lambda forward: self._active.get(forward.id, forward.started))
        since = self._active.get(late.id, late.started)
        return late if snapshot.now - since > PAUSE * self._ttft else None

    def left(self, snapshot: Snapshot, forward: ForwardView) -> float:
        """Seconds of work left in a forward, on the whole device, alone."""
        whole = self._costs.work_of(forward.shape.prefill_tokens)
        return whole * (forward.layers_left + 0.5 * bool(forward.inflight)) / snapshot.layers

    def ahead(self, snapshot: Snapshot, speed: float, passing: bool) -> float:
        """The same of all forwards, as far as new ones have to wait for them.

        For one that is late anyhow they do not, beyond a layer group: they may pass it, unless another does.

        Args:
            speed: share of the whole device's prefill speed to count on.
            passing: whether a forward may pass another at all.
        """
        forwards = snapshot.forwards
        if not forwards:
            return 0.0
        first, *others = (self.left(snapshot, forward) for forward in forwards)
        if passing and snapshot.max_paused > 1 and snapshot.now + first / speed > self.due(snapshot, forwards[0]):
            first = min(first, self._costs.work_of(forwards[0].shape.prefill_tokens) / snapshot.layers)
        return first + sum(others)

    def until_first(self, snapshot: Snapshot, forward: ForwardView) -> float:
        """Seconds of work until each of its rows has its first token: a long prompt may end in a later forward."""
        table = snapshot.table
        rest = sum(int(table.known[row]) - int(table.computed[row]) for row in forward.rows)
        return self.left(snapshot, forward) + (self._costs.work_of(rest) if rest > 0 else 0.0)

    @staticmethod
    def due(snapshot: Snapshot, forward: ForwardView) -> float:
        """When the first of its first tokens is due."""
        return float(min(snapshot.table.ttft_deadline[row] for row in forward.rows))
