"""Which tokens of the backlog go into the next forward, and whether there are blocks for them."""

from __future__ import annotations

import math
from typing import NamedTuple

from smpart.partition import Shape
from smpart.scheduler import memory
from smpart.scheduler.backlog import Backlog
from smpart.scheduler.costs import Costs
from smpart.scheduler.memory import Fit
from smpart.scheduler.pace import Readers
from smpart.scheduler.plan import Piece
from smpart.scheduler.snapshot import Snapshot


class Pack(NamedTuple):
    """Pieces of one forward.

    Attributes:
        preempt: rows that must give way before the first piece can ever be computed.
    """

    pieces: tuple[Piece, ...]
    shape: Shape
    preempt: tuple[int, ...] = ()


_PACE = 0.95
"""Share of the TPOT objective that a step of all admitted rows may take, alone: prefills beside it take some."""
OVER = 2.0
"""A forward may have at most so many times the tokens that saturate the device, unless one prompt has more."""
_MOST_ROWS = 64
"""Rows of one forward at most, unless some were begun."""

EMPTY = Pack((), Shape())


class Room(NamedTuple):
    """What may be taken for prefill now.

    Attributes:
        blocks: for rows that are admitted already.
        fresh: for rows to admit: whoever is admitted must find room for its whole prompt.
        rows: how many may be admitted.
    """

    blocks: int
    fresh: int
    rows: int


def most_rows(snapshot: Snapshot, costs: Costs, readers: Readers, context: int) -> int:
    """Rows to admit at most: the largest batch whose step still holds the pace of those who read now.

    More would make everybody late. Where not even one row can be served at that pace, nothing is gained by holding
    back.

    Args:
        context: tokens that the readers' next step attends to.
    """
    batch = len(readers.tuple)
    if batch == 0 or not snapshot.waiting.size or not snapshot.free_slots:
        return 1 << 30
    return at_pace(snapshot, costs, batch, context, readers.tpot)


def at_pace(snapshot: Snapshot, costs: Costs, batch: int, context: int, tpot: float) -> int:
    """Rows of the largest step that holds a TPOT objective, by one of `batch` rows and `context` tokens."""
    tpot *= _PACE
    now = costs.step(snapshot.predictor, batch, context, snapshot.units).mean
    if now > tpot:
        one = costs.step(snapshot.predictor, 1, -(-context // batch), snapshot.units).mean
        return 1 << 30 if one >= tpot else max(1, int(batch * (tpot - one) / (now - one)))
    double = costs.step(snapshot.predictor, 2 * batch, 2 * context, snapshot.units).mean
    if double <= tpot:
        return 1 << 30
    return batch + int(batch * (tpot - now) / max(double - now, 1e-9))


def room(snapshot: Snapshot, fit: Fit, readers: int, most_rows: int) -> Room:
    """Blocks and rows that prefill may take when decode has what it needs.

    Set aside: the rest of prompts already begun, and one block for each running row to grow into.

    Args:
        readers: rows that take steps.
        most_rows: rows that should be admitted at most, those included.
    """
    if fit.short:
        return Room(0, 0, 0)
    begun = snapshot.prefilling
    rest = int(memory.blocks_wanted(snapshot, begun, snapshot.table.known[begun]).sum()) if begun.size else 0
    admitted = len(begun) + readers + sum(len(forward.rows) for forward in snapshot.forwards)
    return Room(
        fit.free, fit.free - rest - len(snapshot.running), min(snapshot.free_slots, max(0, most_rows - admitted))
    )


class _Company:
    """Whether a prompt that was not begun may join those of a forward, whose first tokens all come when it ends.

    Nobody joins who makes another late that would be in time alone, or who makes much more of the forward than
    enough: what is saturated gains nothing from company.
    """

    def __init__(self, now: float, speed: float, enough: float) -> None:
        self._end, self._speed, self._most = now, speed, OVER * enough
        self._due, self._tokens = math.inf, 0

    def takes(self, tokens: int, work: float) -> bool:
        """Whether a prompt that takes `work` seconds on the whole device may join; the first one always may."""
        fits = self._tokens + tokens <= self._most and self._end + work / self._speed <= self._due
        return fits or not self._tokens

    def add(self, tokens: int, work: float, due: float) -> None:
        """It has joined."""
        self._tokens += tokens
        self._end += work / self._speed
        if due >= self._end:
            self._due = min(self._due, due)


def pack(
    snapshot: Snapshot, backlog: Backlog, room: Room, limit: int, enough: float = math.inf, speed: float = math.inf
) -> Pack:
    """The next pieces in the backlog's order, `limit` tokens at most (the last is cut); ends when there are `enough`.

    No waiting row passes another for want of blocks, but rows that were begun go on: only they can free any.

    Args:
        speed: share of the whole device's prefill speed to count on; infinite: whoever fits joins.
    """
    table, size = snapshot.table, snapshot.block_tokens
    begun = set(snapshot.prefilling.tolist())
    if not begun and (room.rows <= 0 or room.fresh <= 0):
        return EMPTY
    company, closed = _Company(snapshot.now, speed, enough), False
    blocks, fresh, rows, left = room.blocks, room.fresh, room.rows, limit
    pieces: list[Piece] = []
    chunks: list[tuple[int, int]] = []
    line = backlog.rows if begun else backlog.rows[:_MOST_ROWS]
    for place, row in enumerate(line.tolist()):
        if left <= 0 or limit - left >= enough or (closed and not begun):
            break
        start, tokens = int(backlog.starts[place]), int(backlog.tokens[place])
        length, work = min(tokens, left), float(backlog.work[place])
        if row not in begun and not company.takes(length, work):
            break
        if row in begun:
            begun.remove(row)
            owned = int(table.blocks[row])
            length = min(length, (owned + blocks) * size - start)
            if length <= 0:
                continue
            wants = max(0, -(-(start + length) // size) - owned)
        else:
            whole = -(-(start + tokens) // size)
            wants = -(-(start + length) // size)
            closed = closed or rows == 0 or whole > fresh
            if closed:
                continue
            rows, fresh = rows - 1, fresh - whole
        blocks, left = blocks - wants, left - length
        company.add(length, work, float(backlog.deadlines[place]))
        pieces.append(Piece(row, length))
        chunks.append((length, start))
    if not pieces and backlog.rows.size and snapshot.prefilling.size:
        return Pack((), Shape(), memory.unblock(snapshot, int(snapshot.prefilling[0])))
    return Pack(tuple(pieces), Shape.prefill(chunks)) if pieces else EMPTY
