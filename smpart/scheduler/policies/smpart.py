"""The controller: splits the device when a split keeps more promises than sharing it in time, and only then.

At every decision it knows until when the next token of each reader must be there (`pace`), in which order prompts
are best served (`backlog`), and asks the predictor's upper bounds what each way to go on would do (`choice`):
every split, bursts of prefill between steps, a hybrid step, decode alone. A reader's next token within its ITL is worth
one, a first token the more the earlier it is expected before it is due (`demand`); a stutter costs, and so does being
behind the pace of the TPOT, by how long it takes to catch up and how likely the answer is to end meanwhile. Of ways of
equal worth the one that can be kept up is taken, then the one that gets the most work done, then the present one.

Bounds that hold whatever the load: a started forward is paused for at most `PAUSE` TTFT objectives (and one layer
group) while others pass it; prefill as a whole goes without a token for at most `STARVE` of them (`started`); ageing
rows get every fourth start (`backlog`); decode is put off only within every reader's deadline; best-effort readers stay
out of steps that others would pay for, but for one every so often (`suspension`). Under overload requests
that cannot be in time any more go behind those that can; ``smpart:refuse`` refuses them instead.

To learn what its parts are worth they can be left out: ``no-slack`` owes every reader a token each TPOT, whatever it
has ahead, ``no-preemption`` lets no prompt pass a started forward, ``split=P/D`` leaves one split to choose,
``period=MS`` moves the line at most every so many milliseconds. Words are joined by ``+``: ``smpart:refuse+period=20``.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from smpart.errors import UsageError
from smpart.partition import Shape, Split
from smpart.predictor.estimate import NOTHING
from smpart.scheduler import memory
from smpart.scheduler.backlog import NOBODY, Backlog, Standing, Turns
from smpart.scheduler.choice import Choice, Kind, choose
from smpart.scheduler.costs import Costs, Options
from smpart.scheduler.demand import Demand
from smpart.scheduler.lately import MEMORY, Lately
from smpart.scheduler.memory import Fit
from smpart.scheduler.pace import Readers
from smpart.scheduler.packing import EMPTY, Pack, most_rows, pack, room
from smpart.scheduler.plan import Plan, ResumePrefill, StartPrefill, Step, only_decodes
from smpart.scheduler.registry import Setup, register
from smpart.scheduler.snapshot import ForwardView, Rows, Snapshot
from smpart.scheduler.started import Started
from smpart.scheduler.suspension import awake
from smpart.scheduler.table import RequestTable

GROUP = 0.12
"""A layer group takes at most this share of the TPOT objective, unless one layer of a chunk that is worth a forward
takes longer..."""
LEAST_GROUP_S = 2e-3
"""...but need not be shorter than this."""
HOPELESS = 128.0
"""A reader who needs more steps than this on the whole device to catch up counts as lost."""
LEAST_GAIN = 0.1
"""Share of the TPOT objective that a step is counted on to make good at least."""
WIDEN = 1.02
"""A lone decode gets all units if they speed it up by more than this."""

_SURVEY = 8
"""At every so many choices all splits come into question, at the others the neighbours of the last one."""
_COUNTED = 16
"""Prefills whose deadlines are counted."""
_SPLIT, _HYBRID, _, _BURST = Kind

Refusals = tuple[tuple[int, str], ...]


@dataclass(frozen=True, slots=True)
class Variant:
    """What follows ``smpart:``.

    Attributes:
        refuse: whoever cannot be in time is refused.
        slack: readers ahead of their pace may wait.
        preemption: a short prompt may pass a started forward.
        split: the only one there is, in words; "": all that the device has.
        period: seconds between two moves of the line at least.
    """

    refuse: bool = False
    slack: bool = True
    preemption: bool = True
    split: str = ""
    period: float = 0.0

    @classmethod
    def read(cls, argument: str) -> Variant:
        """Raises `UsageError`.

        >>> Variant.read("refuse+period=20")
        Variant(refuse=True, slack=True, preemption=True, split='', period=0.02)
        """
        made = cls()
        for word in filter(None, argument.split("+")):
            name, _, value = word.partition("=")
            if word in _WORDS:
                made = replace(made, **_WORDS[word])
            elif name == "period" and value.isdecimal():
                made = replace(made, period=int(value) / 1e3)
            elif name == "split" and re.fullmatch(r"\d+/\d+", value):
                made = replace(made, split=value)
            else:
                known = ", ".join((*_WORDS, "split=P/D", "period=MS in whole ms"))
                raise UsageError(f"policy smpart:{argument}: {word!r} is none of {known} (joined by +)")
        return made


_WORDS: dict[str, dict[str, Any]] = {
    "refuse": {"refuse": True},
    "no-slack": {"slack": False},
    "no-preemption": {"preemption": False},
}


@register("smpart")
class Smpart:
    """``smpart[:word+word]``; see `Variant`."""

    def __init__(self, setup: Setup) -> None:
        self._variant = Variant.read(setup.argument)
        self.name = f"smpart:{setup.argument}" if setup.argument else "smpart"
        self._moved = -math.inf
        self._group = max(LEAST_GROUP_S, GROUP * setup.slo.tpot_ms / 1e3)
        self._costs = Costs()
        self._started = Started(self._costs, setup.slo.ttft_ms / 1e3)
        self._turns = Turns()
        self._standing = Standing()
        self._readers = Readers(RequestTable(0), np.zeros(0, dtype=np.intp))
        self._last = Choice(Kind.DECODE, Split(0, 1), 1.0)
        self._lately = Lately()
        self._surveys = 0
        self._seen: tuple[Rows, int] = (np.zeros(0, dtype=np.intp), 0)
        self._all: tuple[Split, ...] = ()
        self._proper: tuple[Split, ...] = ()

    def plan(self, snapshot: Snapshot) -> Plan:
        """The next plan."""
        if (resumed := self._resume(snapshot)) is not None:
            return resumed
        self._costs.tick(snapshot.predictor, snapshot.units)
        fit = memory.fit_decode(snapshot)
        readers = self._readers = self._readers.still(snapshot.table, awake(snapshot, self._costs, fit.rows))
        context = readers.context(snapshot.table)
        most = most_rows(snapshot, self._costs, readers, context)
        space = room(snapshot, fit, len(readers.tuple), most)
        refuse: Refusals = ()
        closed = not (snapshot.prefilling.size or (space.rows > 0 and space.fresh > 0) or snapshot.forwards)
        if closed and not self._variant.refuse:  # whatever the order of those who wait, nobody can start
            line, head = NOBODY, EMPTY
        else:
            speed, longest = max(0.2, self._last.speed), self._group * snapshot.layers
            ahead = self._started.ahead(snapshot, speed, self._variant.preemption)
            line = self._standing.line(snapshot, self._costs, self._turns, ahead, speed, longest, self._group)
            refuse = self._refuse(snapshot, line)
            if refuse or fit.preempt:
                line = line.without([*(row for row, _ in refuse), *fit.preempt])
            limit = max(self._costs.tokens_in(longest * speed), self._costs.worth)
            head = pack(snapshot, line, space, limit, self._costs.saturation, speed)
        self._started.note(snapshot, bool(head.pieces))
        self._seen = snapshot.waiting, len(snapshot.prefilling)
        if not head.pieces and not snapshot.forwards:
            if not fit.preempt and (gone := memory.giving_way(snapshot, space.fresh)):
                return Plan(snapshot.split, preempt=gone, refuse=refuse, reason="a best-effort reader makes room")
            full = closed and (space.fresh <= 0 or not snapshot.free_slots) and not self._variant.refuse
            return self._decode_alone(snapshot, fit, context, head, refuse, full)
        if not readers.tuple:
            return self._prefill_alone(snapshot, fit, line, head, refuse)
        choice = self._last = self._choose(snapshot, readers, context, line, head)
        if choice.kind is _HYBRID:
            head = pack(snapshot, line, space, choice.chunk)
        reason = self._reason(choice, len(readers.tuple), line, snapshot)
        step = prefill = None
        burst = (
            choice.kind is _BURST and choice.seconds > self._costs.work_of(head.shape.prefill_tokens) / snapshot.layers
        )
        split = Split(snapshot.units, 0) if burst else choice.split
        if not burst and snapshot.decode_lane.room:
            step = Step(readers.tuple, head.pieces if choice.kind is _HYBRID else ())
            if step.pieces:
                self._started.fed(snapshot.now)
        if split.prefill:
            bound = min(self._group, choice.seconds) if burst else self._group
            prefill = self._prefill(snapshot, line, head, split.prefill, bound, choice.drain)
        onward = choice.kind is _SPLIT and len(snapshot.forwards) == 1 and isinstance(prefill, ResumePrefill)
        return Plan(split, prefill, step, preempt=fit.preempt, refuse=refuse, onward=onward, reason=reason)

    def _resume(self, snapshot: Snapshot) -> Plan | None:
        """The next layer group of the forward that goes on beside a step under way, if nothing else changed."""
        last, forwards = self._last, snapshot.forwards
        unchanged = snapshot.waiting is self._seen[0] and len(snapshot.prefilling) == self._seen[1]
        if (
            not (unchanged and len(forwards) == 1 and forwards[0].layers_left and snapshot.prefill_lane.room)
            or snapshot.decode_lane.room
            or last.kind is not _SPLIT
            or last.split != snapshot.split
        ):
            return None
        prefill = self._go_on(snapshot, forwards[0], last.split.prefill, self._group)
        return Plan(last.split, prefill, onward=True, reason="the forward goes on beside the step")

    def proper(self, snapshot: Snapshot) -> tuple[Split, ...]:
        """The splits to choose from that give both sides units. Raises `UsageError` if the only one wanted is none."""
        wanted = self._variant.split
        proper = tuple(split for split in snapshot.splits if not split.exclusive and wanted in ("", str(split)))
        if wanted and not proper:
            raise UsageError(f"policy {self.name}: this device has no split {wanted}")
        return proper

    # ---- one side only

    def _prefill_alone(self, snapshot: Snapshot, fit: Fit, line: Backlog, head: Pack, refuse: Refusals) -> Plan:
        """Nothing to decode: prefill has the device."""
        preempt = fit.preempt + head.preempt
        whole = Split(snapshot.units, 0)
        self._last = Choice(Kind.DECODE, whole, 1.0)
        prefill = self._prefill(snapshot, line, head, snapshot.units, self._group, False)
        return Plan(whole, prefill, preempt=preempt, refuse=refuse, reason="nothing to decode: prefill has the device")

    def _decode_alone(
        self, snapshot: Snapshot, fit: Fit, context: int, head: Pack, refuse: Refusals, full: bool
    ) -> Plan:
        """No prefill to launch: decode has the device, unless the units would not speed it up.

        Args:
            full: whoever waits finds no blocks or no slot before somebody ends.
        """
        preempt = fit.preempt + head.preempt
        if not self._readers.tuple:  # nobody is worth staying out for
            self._readers = self._readers.still(snapshot.table, fit.rows)
            context = self._readers.context(snapshot.table)
        if not self._readers.tuple:
            return Plan(snapshot.split, preempt=preempt, refuse=refuse, reason="nothing can be launched")
        batch, held = len(self._readers.tuple), snapshot.split
        split = Split(0, snapshot.units)
        if 0 < held.decode < snapshot.units:
            now = self._costs.step(snapshot.predictor, batch, context, held.decode).mean
            if now <= WIDEN * self._costs.step(snapshot.predictor, batch, context, snapshot.units).mean:
                split = held
        step = Step(self._readers.tuple) if snapshot.decode_lane.room else None
        reason = "no prefill waits" if not snapshot.waiting.size else "no room to admit"
        reason = f"{reason}: decode on {split.decode}"
        steady = split.exclusive and only_decodes(snapshot, batch, full)
        if steady:
            self._started.nobody_can_start()
        return Plan(split, step=step, preempt=preempt, refuse=refuse, steady=steady, reason=reason)

    # ---- both sides

    def _choose(self, snapshot: Snapshot, readers: Readers, context: int, line: Backlog, head: Pack) -> Choice:
        last = self._last
        if last.kind is _SPLIT and last.split == snapshot.split and not snapshot.decode_lane.room:
            return last  # its step is under way: nothing is to be chosen before that ends
        if snapshot.now < self._moved + self._variant.period and self._still_possible(snapshot, head):
            return last
        if snapshot.splits is not self._all:
            self._all, self._proper = snapshot.splits, self.proper(snapshot)
        predictor = snapshot.predictor
        shape = head.shape if head.pieces else snapshot.forwards[-1].shape
        options = self._costs.options(predictor, len(readers.tuple), context, shape, self._proper, snapshot.units)
        demand = self._demand(snapshot, readers, line, head, shape, options)
        self._surveys += 1
        choice = choose(snapshot, self._proper, predictor, options, demand, self._last)
        if (choice.kind, choice.split) != (self._last.kind, self._last.split):
            self._moved = snapshot.now
        self._lately.chosen(max(snapshot.now, snapshot.decode_lane.busy_until), choice.period, MEMORY * readers.tpot)
        return choice

    def _demand(
        self, snapshot: Snapshot, readers: Readers, line: Backlog, head: Pack, shape: Shape, options: Options
    ) -> Demand:
        """What readers and prompts ask for."""
        begin, forwards = max(snapshot.now, snapshot.decode_lane.busy_until), snapshot.forwards
        if self._variant.slack:
            due = readers.latest(snapshot.table, begin, options.alone.upper)
            paces, price = self._paces(snapshot, readers, begin, options.alone.mean)
        else:
            due = np.full(len(readers.tuple), begin + max(readers.tpot, 1.15 * options.alone.upper))
            paces, price = [], 0.0
        due.sort()
        count = min(len(line.rows), max(len(head.pieces), min(line.saved, _COUNTED)))
        effort = snapshot.table.best_effort
        work, first = line.work[:count].tolist(), line.deadlines[:count].tolist()
        weight = (~effort.take(line.rows[:count])).astype(int).tolist()
        if forwards:
            work = [self._started.until_first(snapshot, forward) for forward in forwards] + work
            first = [self._started.due(snapshot, forward) for forward in forwards] + first
            weight = [int(np.count_nonzero(~effort[list(forward.rows)])) for forward in forwards] + weight
        return Demand(
            due.tolist(),
            paces,
            price,
            readers.tpot,
            readers.itl,
            self._waited(snapshot, readers),
            work,
            first,
            weight,
            options.rate,
            options.rate * shape.prefill_tokens / snapshot.layers,
            self._started.starving(snapshot.now),
            self._surveys % _SURVEY == 0,
        )

    def _paces(self, snapshot: Snapshot, readers: Readers, begin: float, alone: float) -> tuple[list[float], float]:
        """See `Demand`. What a second behind the pace is worth: how many steps as they were lately make it good, and
        how likely the answer ends at each. Lost is who needs too many steps of `alone` seconds, on the whole device."""
        tpot = readers.tpot
        if tpot <= alone:
            return [], 0.0
        pace, ends = readers.pace(snapshot.table)
        pace.sort()
        lost = pace.searchsorted(begin - HOPELESS * max(tpot - alone, LEAST_GAIN * tpot))
        gain = max(tpot - self._lately.seconds(begin, alone, MEMORY * tpot), LEAST_GAIN * tpot)
        return pace[lost:].tolist(), ends / gain

    def _still_possible(self, snapshot: Snapshot, head: Pack) -> bool:
        """Whether the last choice can be made again."""
        kind = self._last.kind
        return kind is _SPLIT or (kind is _HYBRID and not snapshot.forwards and bool(head.pieces))

    def _prefill(
        self, snapshot: Snapshot, line: Backlog, head: Pack, units: int, bound: float, drain: bool
    ) -> StartPrefill | ResumePrefill | None:
        """The next layer group: of a started forward, or of a new one that passes it."""
        if not snapshot.prefill_lane.room:
            return None
        paused = [forward for forward in snapshot.forwards if forward.layers_left]
        fresh = bool(head.pieces) and len(snapshot.forwards) < snapshot.max_paused and not drain
        if paused and not (fresh and self._may_pass(snapshot, line, head, paused)):
            return self._go_on(snapshot, self._started.overdue(snapshot, paused) or paused[-1], units, bound)
        if fresh:
            self._started.fed(snapshot.now)
            return StartPrefill(head.pieces, self._layers(snapshot, head.shape, units, bound, snapshot.layers))
        return None

    def _go_on(self, snapshot: Snapshot, forward: ForwardView, units: int, bound: float) -> ResumePrefill:
        """The next layer group of a started forward."""
        self._started.resumed(forward, snapshot.now)
        return ResumePrefill(forward.id, self._layers(snapshot, forward.shape, units, bound, forward.layers_left))

    def _may_pass(self, snapshot: Snapshot, line: Backlog, head: Pack, paused: list[ForwardView]) -> bool:
        """Whether a new forward may start before the paused one goes on: a short one that can be saved, if that
        costs the paused one nothing. Nobody passes a forward that passed another, nor one that waited too long."""
        if not self._variant.preemption or len(paused) > 1 or not line.saved or self._started.overdue(snapshot, paused):
            return False
        work = self._costs.work_of(head.shape.prefill_tokens)
        left = self._started.left(snapshot, paused[0])
        slack = self._started.due(snapshot, paused[0]) - snapshot.now - left / max(0.2, self._last.speed)
        return work <= 0.5 * left and (slack < 0 or work / max(0.2, self._last.speed) <= 0.5 * slack)

    def _layers(self, snapshot: Snapshot, shape: Shape, units: int, bound: float, left: int) -> int | None:
        """Layers that take `bound` seconds at most (but one at least); None: all that are left."""
        beside = snapshot.decode_lane.shape if units < snapshot.units else NOTHING
        forward = self._costs.beside(snapshot.predictor, shape, units, beside)
        layers = max(1, int(bound * snapshot.layers / forward))
        return None if layers >= left else layers

    def _waited(self, snapshot: Snapshot, readers: Readers) -> float:
        """Seconds that the readers will have been without a token when the whole device is free."""
        if snapshot.decode_lane.inflight:
            return 0.0
        last = float(np.fmin.reduce(snapshot.table.last_token.take(readers.rows)))
        return max(0.0, max(snapshot.now, snapshot.prefill_lane.busy_until) - last)

    def _refuse(self, snapshot: Snapshot, line: Backlog) -> Refusals:
        """Waiting rows whose first token cannot be in time, if late ones are to be refused."""
        if not self._variant.refuse:
            return ()
        late = line.rows[line.saved :]
        table = snapshot.table
        late = late[(table.slot[late] < 0) & (table.outputs[late] == 0) & ~table.best_effort[late]]
        return tuple((int(row), "overload: its first token could not be in time") for row in late)

    def _reason(self, choice: Choice, batch: int, line: Backlog, snapshot: Snapshot) -> str:
        kind = f"{choice.kind} {choice.chunk}" if choice.chunk else str(choice.kind)
        drain = ", hybrid when its forwards end" if choice.drain else ""
        waits = len(line.rows) + len(snapshot.forwards)
        return f"{kind} {choice.split}: {choice.kept}/{choice.asked} in time, {batch} decode, {waits} prefill{drain}"
