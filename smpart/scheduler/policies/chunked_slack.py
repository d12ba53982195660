"""Chunked prefill with smpart's order, admission and deadlines, and no split: it tells what the split itself is worth.

Not published by others. Every launch is one step on the whole device. It knows until when each reader's next token must
be there (`pace`) and in which order prompts are best served (`backlog`). The chunk is the largest whose step, by the
predictor's upper bound, holds the TPOT objective; if prompts that can be saved would be late at that speed, the largest
that ends before the first reader's token is due. Bounds: prefill as a whole goes without a token for at most `STARVE`
TTFT objectives; ageing rows get every fourth start (`backlog`).
"""

from __future__ import annotations

import math

import numpy as np

from smpart.partition import Shape, Split
from smpart.predictor.estimate import Estimate
from smpart.scheduler import memory
from smpart.scheduler.backlog import Backlog, Standing, Turns
from smpart.scheduler.costs import CHUNKS, Costs, Options
from smpart.scheduler.pace import Readers
from smpart.scheduler.packing import EMPTY, Pack, most_rows, pack, room
from smpart.scheduler.plan import Plan, Step, only_decodes
from smpart.scheduler.registry import Setup, register
from smpart.scheduler.snapshot import Snapshot
from smpart.scheduler.table import RequestTable

STARVE = 2.0
CREDIT = 8.0
"""A reader may fall behind the pace by what so many steps would make good again, unless somebody waits in vain."""


@register("chunked+slack")
class ChunkedSlack:
    """``chunked+slack``."""

    def __init__(self, setup: Setup) -> None:
        setup.nothing("chunked+slack")
        self.name = "chunked+slack"
        self._ttft, self._tpot = setup.slo.ttft_ms / 1e3, setup.slo.tpot_ms / 1e3
        self._costs = Costs()
        self._turns = Turns()
        self._standing = Standing()
        self._readers = Readers(RequestTable(0), np.zeros(0, dtype=np.intp))
        self._speed = 1.0
        self._fed = -math.inf

    def plan(self, snapshot: Snapshot) -> Plan:
        """One step of readers and the chunk there is time for."""
        self._note_progress(snapshot)
        whole = Split(0, snapshot.units)
        if snapshot.decode_lane.room == 0:
            return Plan(whole, reason="the lane is full")
        self._costs.tick(snapshot.predictor, snapshot.units)
        fit = memory.fit_decode(snapshot)
        readers = self._readers = self._readers.still(snapshot.table, fit.rows)
        context = readers.context(snapshot.table)
        space = room(snapshot, fit, most_rows(snapshot, self._costs, readers, context))
        speed = max(0.2, self._speed)
        line = self._standing.line(snapshot, self._costs, self._turns, 0.0, speed, self._tpot, 0.1 * self._tpot)
        chunk = self._costs.tokens_in(self._tpot)
        head = EMPTY if fit.short else pack(snapshot, line, space, chunk, math.inf)
        self._speed = 1.0
        if readers.tuple and head.pieces:
            chunk = self._chunk(snapshot, readers, context, line, head)
            head = pack(snapshot, line, space, chunk, math.inf) if chunk else EMPTY
        step = Step(readers.tuple, head.pieces) if readers.tuple or head.pieces else None
        reason = f"{len(readers.tuple)} decodes, {head.shape.prefill_tokens} tokens of {len(line.rows)} prompts"
        steady = only_decodes(snapshot, len(readers.tuple))
        return Plan(whole, step=step, preempt=fit.preempt + head.preempt, steady=steady, reason=reason)

    def _chunk(self, snapshot: Snapshot, readers: Readers, context: int, line: Backlog, head: Pack) -> int:
        """Prompt tokens beside the readers' step; 0 if any at all would make one late who need not be."""
        step = Shape.decode(len(readers.tuple), context)
        tokens, behind = head.shape.prefill_tokens, head.shape.prefill_context
        fresh: list[Estimate | None] = [None] * len(CHUNKS)  # all hang on the hybrid step: nothing old is good enough
        options = Options(snapshot.predictor, step, tokens, behind, (), snapshot.units, fresh)
        begin = max(snapshot.now, snapshot.decode_lane.busy_until)
        credit = CREDIT if line.saved == len(line.rows) else 0.0
        spare = float(readers.due(snapshot.table, begin, options.alone.upper, credit).min()) - begin
        chunk, upper = self._largest(snapshot, options, min(readers.tpot, spare))
        if spare > readers.tpot and self._late(line, begin):
            chunk, upper = self._largest(snapshot, options, spare)
        starved = snapshot.now - self._fed > STARVE * self._ttft
        return chunk if upper <= spare or options.alone.upper > spare or starved else 0

    def _largest(self, snapshot: Snapshot, options: Options, limit: float) -> tuple[int, float]:
        """The largest chunk whose step ends within `limit` seconds (the smallest if none does), and that step's bound.

        Notes the speed of prefill it means, 1 = alone on the whole device.
        """
        chunk, mean, upper = options.hybrid(snapshot.predictor, limit)
        self._speed = min(1.0, chunk * options.rate / mean)
        return chunk, upper

    def _late(self, line: Backlog, begin: float) -> bool:
        """Whether a prompt that can be saved would be late at the present speed."""
        ends = begin + np.cumsum(line.work[: line.saved]) / max(1e-9, self._speed)
        return bool((ends > line.deadlines[: line.saved]).any())

    def _note_progress(self, snapshot: Snapshot) -> None:
        """Remember when prefill was last seen to get on, or to have something to do after it had nothing."""
        if not (snapshot.waiting.size or snapshot.prefilling.size):
            self._fed = -math.inf
        elif self._fed == -math.inf or snapshot.decode_lane.shape.prefill_tokens:
            self._fed = snapshot.now
