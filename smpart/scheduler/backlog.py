"""The prefill work that is waiting, in the order it should be served.

Rows are served by earliest deadline, as long as every deadline can be kept. When one cannot, the longest prompts are
given up first (Moore and Hodgson's algorithm: the fewest late jobs on one machine); who is given up goes behind those
who can still be saved, in order of arrival, and best-effort work goes last. So that nobody is passed over without end,
one start in `SHARE` goes to whoever has waited longest once its age passes `AGE` TTFT objectives (best-effort work
does not age: it is promised what is left, and no more).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from itertools import accumulate
from operator import gt
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from smpart.scheduler import memory
from smpart.scheduler.costs import Costs, Floats
from smpart.scheduler.memory import Counts
from smpart.scheduler.snapshot import Rows, Snapshot

Bools = NDArray[np.bool_]

AGE = 2.0
SHARE = 4
_WEIGHED = 16
"""Rows, by earliest deadline, of which the best subset to save is sought; those behind them keep their order."""


class Backlog(NamedTuple):
    """Rows to prefill, first to serve first.

    Attributes:
        starts: first token each has to compute.
        tokens: tokens left to compute.
        work: seconds of them alone on the whole device.
        deadlines: when the first token is due; for rows that have had theirs, when the next one was due.
        saved: how many rows at the front can still be in time; the others behind them cannot.
    """

    rows: Rows
    starts: Counts
    tokens: Counts
    work: Floats
    deadlines: Floats
    saved: int

    def without(self, gone: Sequence[int]) -> Backlog:
        """The backlog less some rows."""
        stay = ~np.isin(self.rows, gone)
        saved = int(np.count_nonzero(stay[: self.saved]))
        return Backlog(
            self.rows[stay], self.starts[stay], self.tokens[stay], self.work[stay], self.deadlines[stay], saved
        )


_NONE = np.zeros(0)
NOBODY = Backlog(_NONE.astype(np.intp), _NONE.astype(np.int32), _NONE.astype(np.int32), _NONE, _NONE, 0)


class Turns:
    """Remembers whose turn among the aged it is. A turn ends when its row is seen to have got on."""

    def __init__(self) -> None:
        self._next = 0.0
        self._given: tuple[int, int, float] | None = None

    @property
    def given(self) -> bool:
        """Whether it is somebody's turn."""
        return self._given is not None

    def due(self, now: float) -> bool:
        """Whether the aged may have a start now."""
        return now >= self._next

    def give(self, seq: int, start: int, cost: float) -> None:
        """Row `seq` leads the backlog from token `start` on because of its age."""
        self._given = seq, start, cost

    def look(self, now: float, seqs: NDArray[np.int64], starts: Counts) -> None:
        """End the turn of a row that is no longer where it was: the others now have `SHARE` - 1 times as long."""
        if self._given is not None:
            seq, start, cost = self._given
            if not ((seqs == seq) & (starts == start)).any():
                self._next = now + (SHARE - 1) * cost
                self._given = None


def backlog(snapshot: Snapshot, costs: Costs, turns: Turns, ahead: float, speed: float, longest: float) -> Backlog:
    """The rows that wait for prefill.

    Args:
        ahead: seconds of work (whole device, alone) in started forwards, to be done first.
        speed: share of the whole device's prefill speed to count on.
        longest: seconds (whole device) of one forward at most.
    """
    table, now, begun = snapshot.table, snapshot.now, snapshot.prefilling
    rows, starts = snapshot.waiting, memory.first_token(snapshot, snapshot.waiting)
    if begun.size:
        rows, starts = np.concatenate((begun, rows)), np.concatenate((table.computed.take(begun), starts))
    tokens = table.known.take(rows) - starts
    work = costs.work(tokens)
    deadlines = table.ttft_deadline.take(rows)
    again, effort = table.outputs.take(rows) > 0, table.best_effort.take(rows)
    order, first, saved = _groups(again, deadlines - work < now, effort, deadlines)
    if saved > 1:
        order, saved = _save(order, first, saved, work, deadlines, now + ahead / speed, speed)
    if saved < len(rows) and not first:  # nobody ages past readers who lost their blocks
        order, saved = _aged(snapshot, turns, rows, starts, order, saved, np.minimum(work, longest) / speed)
    return Backlog(
        rows.take(order), starts.take(order), tokens.take(order), work.take(order), deadlines.take(order), saved
    )


class Standing:
    """The backlog, made anew only when rows joined, left or got on, or when time alone may have changed its order."""

    def __init__(self) -> None:
        self._rows: tuple[bytes, ...] = ()
        self._line = NOBODY
        self._until = -math.inf
        self._from = self._to = self._speed = 0.0

    def line(
        self, snapshot: Snapshot, costs: Costs, turns: Turns, ahead: float, speed: float, longest: float, life: float
    ) -> Backlog:
        """As `backlog`, which says what the arguments are.

        Args:
            life: seconds by which the moment that the first row can be served from may move.
        """
        table, waiting, begun = snapshot.table, snapshot.waiting, snapshot.prefilling
        seqs, cached = table.seq.take(waiting), table.cached.take(waiting)
        rows: tuple[bytes, ...] = waiting.tobytes(), seqs.tobytes(), cached.tobytes()
        if begun.size:
            rows += begun.tobytes(), table.seq.take(begun).tobytes(), table.computed.take(begun).tobytes()
        start = snapshot.now + ahead / speed
        same = snapshot.now < self._until and self._from <= start <= self._to and rows == self._rows
        if not same or abs(speed - self._speed) > 0.1 * speed:
            line = self._line = backlog(snapshot, costs, turns, ahead, speed, longest)
            self._rows, self._speed = rows, speed
            self._note_life(line, snapshot.now, start, life)
        return self._line

    def _note_life(self, line: Backlog, now: float, start: float, life: float) -> None:
        """Until when, and for which starts, the same rows can be saved."""
        work, due = line.work[: line.saved], line.deadlines[: line.saved]
        self._until = now + life
        if len(work):
            self._until = min(self._until, float(np.minimum.reduce(due - work)))
            due = due[:_WEIGHED] - np.add.accumulate(work[:_WEIGHED]) / self._speed
            life = min(life, float(np.minimum.reduce(due)) - start)
        self._from, self._to = start - abs(life), start + max(0.0, life)


def _groups(again: Bools, late: Bools, effort: Bools, deadlines: Floats) -> tuple[Rows, int, int]:
    """Order of service before anything is weighed; how many rows were preempted; how many can be saved with them.

    First rows that were preempted, then by deadline those that can be in time, those that cannot, best effort last;
    arrival order otherwise.
    """
    if np.count_nonzero(effort):
        masks = [again & ~effort, ~(again | late | effort), late & ~(again | effort), effort]
    else:
        masks = [again, ~(again | late), late & ~again]
    parts = [mask.nonzero()[0] for mask in masks]
    first, hopeful = len(parts[0]), parts[1]
    if len(hopeful) > 1:
        parts[1] = hopeful[deadlines[hopeful].argsort(kind="stable")]
    return np.concatenate(parts), first, first + len(hopeful)


def _save(
    order: Rows, first: int, saved: int, work: Floats, deadlines: Floats, start: float, speed: float
) -> tuple[Rows, int]:
    """Reorder the rows that can be saved: give up the longest if not all can be, let short ones pass long ones."""
    weighed = min(saved, first + _WEIGHED)
    line = order[:weighed]
    seconds, due = (work.take(line) / speed).tolist(), deadlines.take(line).tolist()
    begin = start + sum(seconds[:first])
    ends = accumulate(seconds[first:], initial=begin)
    next(ends)
    places = list(range(weighed))
    lost: list[int] = []
    if any(map(gt, ends, due[first:])):
        kept, gone = _fewest_late(seconds[first:], due[first:], begin)
        places[first:], lost = [first + place for place in kept], [first + place for place in gone]
    if len(places) - first > 1:
        lead = places[first]
        left, short = 0.5 * (due[lead] - begin - seconds[lead]), 0.25 * seconds[lead]
        quick = [p for p in places[first + 1 :] if seconds[p] <= short and (left := left - seconds[p]) >= 0.0]
        if quick:
            places[first:] = quick + [place for place in places[first:] if place not in quick]
        elif not lost:
            return order, saved
    elif not lost:
        return order, saved
    order = np.concatenate((line[places], order[weighed:saved], line[lost], order[saved:]))
    return order, saved - len(lost)


def _fewest_late(seconds: list[float], due: list[float], start: float) -> tuple[list[int], list[int]]:
    """Moore and Hodgson: jobs in order of `due`; the positions that are kept, and those given up, in order."""
    heap: list[tuple[float, int]] = []
    end = start
    lost = []
    for place, (length, deadline) in enumerate(zip(seconds, due, strict=True)):
        heapq.heappush(heap, (-length, place))
        end += length
        if end > deadline:
            longest, gone = heapq.heappop(heap)
            end += longest
            lost.append(gone)
    return sorted(place for _, place in heap), sorted(lost)


def _aged(
    snapshot: Snapshot, turns: Turns, rows: Rows, starts: Counts, order: Rows, saved: int, seconds: Floats
) -> tuple[Rows, int]:
    """Let the longest-waiting row lead when it is the turn of the aged."""
    table, now = snapshot.table, snapshot.now
    if turns.given:
        turns.look(now, table.seq[rows], starts)
    if not turns.due(now):
        return order, saved
    late = order[saved:]
    behind = rows[late]
    arrivals = table.arrival[behind]
    aged = late[(now - arrivals > AGE * (table.ttft_deadline[behind] - arrivals)) & ~table.best_effort[behind]]
    if not aged.size:
        return order, saved
    oldest = int(aged[table.seq[rows[aged]].argmin()])
    turns.give(int(table.seq[rows[oldest]]), int(starts[oldest]), float(seconds[oldest]))
    rest = order[order != oldest]
    return np.concatenate((np.array([oldest], dtype=rest.dtype), rest)), saved + 1
