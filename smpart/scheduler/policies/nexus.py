"""One phase gets all the units that the other can spare; which one, the KV memory decides (Nexus).

Source: Nexus (arXiv 2507.06608) sections 4 and 5. Simplified: the engine's predictor stands for the paper's cost model
(its terms for saturation are not printed), so that only the rule differs; contention is left out of both sides of the
comparison, since the engine's slows a phase down on any share; the split moves along those that exist, not in steps of
one percent; a KV block that requests share counts once for each. Chosen where the paper is silent: a split is applied
if it changes the prefill share by more than five points; the age of a prompt counts in milliseconds (in seconds,
``nexus:15``, it would change next to nothing, and long prompts would starve); a prompt over the batch limit is cut when
it comes first, for it would wait for ever. No objective enters.

As printed, the bound on the other phase is relative to what it would take on the whole device, so that "decode first"
can leave decode less than "prefill first" does.
"""

from __future__ import annotations

import numpy as np

from smpart.partition import Shape, Side, Split
from smpart.scheduler import memory
from smpart.scheduler.memory import Fit
from smpart.scheduler.pair import TwoLanes, Work, nearest, proper, started
from smpart.scheduler.plan import Piece
from smpart.scheduler.registry import Setup, register
from smpart.scheduler.snapshot import Rows, Snapshot

KV_SHARE = 0.7
"""Share of the KV memory in use up to which prefill is the target."""
DECODE_SLACK, PREFILL_SLACK = 1.1, 1.3
"""How much longer than on the whole device the phase that is not the target may take."""
AGEING = 15_000
"""Tokens by which a prompt moves up for each second that it has waited."""
LEAST_CHANGE = 0.05


@register("nexus")
class Nexus(TwoLanes):
    """``nexus[:ageing]``: `ageing` in tokens a second. A forward runs as a whole, in no layer groups."""

    def __init__(self, setup: Setup) -> None:
        self._ageing = setup.whole("nexus", AGEING)
        self.name = f"nexus:{self._ageing}" if setup.argument else "nexus"
        self._all: tuple[Split, ...] = ()
        self._proper: tuple[Split, ...] = ()
        self._split = Split(0, 1)
        if setup.splits:
            proper(setup.splits)

    def split_for(self, snapshot: Snapshot, step: Shape, work: Work) -> Split:
        """The present split, unless the best is far enough from it."""
        if snapshot.splits != self._all:
            self._all, self._proper = snapshot.splits, proper(snapshot.splits)
            self._split = nearest(self._proper, 0.5)
        best = self._search(snapshot, step, work.shape)
        if abs(best.prefill - self._split.prefill) > LEAST_CHANGE * snapshot.units:
            self._split = best
        return self._split

    def layers(self, snapshot: Snapshot, step: Shape, work: Work, split: Split) -> int | None:
        """All."""
        return None

    def pack(self, snapshot: Snapshot, fit: Fit) -> Work:
        """Shortest rest first, less what age takes off; the first one that does not fit ends it."""
        if fit.short:
            return Work()
        table, size, limit = snapshot.table, snapshot.block_tokens, self.pack_tokens
        begun, waiting = snapshot.prefilling, snapshot.waiting
        rows = np.concatenate((begun, waiting))
        starts = np.concatenate((table.computed.take(begun), memory.first_token(snapshot, waiting)))
        rest = table.known.take(rows) - starts
        order = np.argsort(rest - self._ageing * (snapshot.now - table.arrival.take(rows)), kind="stable")
        pieces: list[Piece] = []
        chunks: list[tuple[int, int]] = []
        left, free, slots = limit, fit.free, snapshot.free_slots
        for row, start, tokens in zip(*(a[order].tolist() for a in (rows, starts, rest)), strict=True):
            length = tokens if pieces else min(tokens, limit)
            blocks = max(0, -(-(start + length) // size) - int(table.blocks[row]))
            fresh = int(table.slot[row] < 0)
            if length > left or blocks > free or fresh > slots:
                break
            pieces.append(Piece(row, length))
            chunks.append((length, start))
            left, free, slots = left - length, free - blocks, slots - fresh
        if not pieces and begun.size:
            return self._begun(snapshot, fit, begun)
        return started(snapshot, pieces, chunks)

    def _begun(self, snapshot: Snapshot, fit: Fit, begun: Rows) -> Work:
        """Nobody fits: what was begun goes on, for only that can free any blocks."""
        table = snapshot.table
        for row in begun.tolist():
            start = int(table.computed[row])
            room = (fit.free + int(table.blocks[row])) * snapshot.block_tokens - start
            length = min(int(table.known[row]) - start, self.pack_tokens, room)
            if length > 0:
                return started(snapshot, [Piece(row, length)], [(length, start)])
        return Work(preempt=memory.unblock(snapshot, int(begun[0])))

    def _search(self, snapshot: Snapshot, step: Shape, head: Shape) -> Split:
        """Algorithm 1: the largest share for the target that keeps the other phase within its slack."""
        predict, whole = snapshot.predictor.predict, snapshot.units
        used = int(snapshot.table.blocks.sum())
        if used <= KV_SHARE * (used + snapshot.free_blocks):
            side, shape, slack, ladder = Side.DECODE, step, DECODE_SLACK, self._proper[::-1]
        else:
            side, shape, slack, ladder = Side.PREFILL, head, PREFILL_SLACK, self._proper
        limit = slack * predict(shape, whole).mean

        def other(split: Split) -> float:
            return predict(shape, split.units(side)).mean

        place = ladder.index(self._split)
        while place > 0 and other(ladder[place]) > limit:
            place -= 1
        while place + 1 < len(ladder) and other(ladder[place + 1]) <= limit:
            place += 1
        return ladder[place]
