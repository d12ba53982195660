"""Block arithmetic that policies share: what a token costs in blocks, and who gives way when they run out."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from smpart.scheduler.snapshot import Rows, Snapshot
from smpart.scheduler.table import State

Counts = NDArray[np.signedinteger[Any]]

_LEAVING = int(State.LEAVING)
"""A plain number: looking a member up in its enumeration costs more than the comparison it is for."""


class Fit(NamedTuple):
    """Which of the rows that asked for blocks have them.

    Attributes:
        rows: rows whose blocks are there now, in the order asked.
        preempt: rows that give their blocks back.
        free: blocks left when `rows` have theirs.
        short: somebody was preempted or waits for blocks that are on their way: admit nobody.
    """

    rows: Rows
    preempt: tuple[int, ...]
    free: int
    short: bool


def first_token(snapshot: Snapshot, waiting: Rows) -> Counts:
    """First token position that waiting rows have to compute: behind the prefix hit, but never past the last token."""
    first: Counts = np.minimum(snapshot.table.cached.take(waiting), snapshot.table.known.take(waiting) - 1)
    return first


def blocks_wanted(snapshot: Snapshot, rows: Rows, upto: Counts) -> Counts:
    """New blocks each row needs to hold its tokens ``0 .. upto``; prefix hits count in full, they may be evictable."""
    wanted = -(-upto // snapshot.block_tokens) - snapshot.table.blocks[rows]
    counts: Counts = np.maximum(wanted, 0).astype(np.int64)
    return counts


def fit_decode(snapshot: Snapshot) -> Fit:
    """The running rows that can take one more token, after vLLM's preemption where blocks run out.

    Prefilling rows that are not part of a started forward can be made to give way too.
    """
    rows = snapshot.running
    table = snapshot.table
    need = table.computed.take(rows) >= table.blocks.take(rows) * snapshot.block_tokens
    total = int(np.count_nonzero(need))
    if total <= snapshot.free_blocks:
        return Fit(rows, (), snapshot.free_blocks - total, False)
    return squeeze(snapshot, rows, need.astype(np.int64), snapshot.prefilling)


def fit(snapshot: Snapshot, rows: Rows, need: Counts) -> Fit:
    """Like `fit_decode` for rows that each need `need` blocks."""
    total = int(need.sum())
    if total <= snapshot.free_blocks:
        return Fit(rows, (), snapshot.free_blocks - total, False)
    return squeeze(snapshot, rows, need, rows[:0])


def squeeze(snapshot: Snapshot, rows: Rows, need: Counts, idle: Rows) -> Fit:
    """Give blocks to `rows` in order of arrival, preempting from the tail: vLLM V1's rule.

    The tail is the latest arrival, best-effort rows before interactive ones; `idle` rows ask for nothing but can
    be preempted. A victim with work in flight frees its blocks only later: whoever waits for them keeps its place
    and nobody else is preempted for the same blocks. A row that would have to preempt itself waits instead while
    started forwards hold blocks, for their rows will be in the tail.
    """
    table = snapshot.table
    everyone = np.concatenate((rows, idle))
    wants = np.concatenate((need, np.zeros(len(idle), dtype=np.int64)))
    order = np.lexsort((table.seq[everyone], table.best_effort[everyone]))
    line, wants_list = everyone[order].tolist(), wants[order].tolist()
    free = snapshot.free_blocks
    coming = int(table.blocks[table.state == _LEAVING].sum())
    kept: list[int] = []
    preempt: list[int] = []
    place, tail, waits = 0, len(line), False
    while place < tail:
        want = wants_list[place]
        while want > free + coming and tail - 1 > place:
            tail -= 1
            free, coming = _give_back(snapshot, line[tail], free, coming)
            preempt.append(line[tail])
        if want <= free:
            free -= want
            kept.append(line[place])
        elif want <= free + coming:
            coming, free, waits = coming - (want - free), 0, True
        elif snapshot.forwards:
            waits = True
        else:
            free, coming = _give_back(snapshot, line[place], free, coming)
            preempt.append(line[place])
        place += 1
    fits = rows[np.isin(rows, np.asarray(kept, dtype=np.intp))]
    return Fit(fits, tuple(preempt), free, waits or bool(preempt))


def _give_back(snapshot: Snapshot, row: int, free: int, coming: int) -> tuple[int, int]:
    blocks = int(snapshot.table.blocks[row])
    return (free, coming + blocks) if snapshot.table.flying[row] else (free + blocks, coming)


def unblock(snapshot: Snapshot, row: int) -> tuple[int, ...]:
    """Whom to preempt so that the half-computed `row` can go on when nothing that runs will ever free a block.

    Prefilling rows that arrived after it give way, the latest first, until one block is free.
    """
    table = snapshot.table
    if snapshot.running.size or snapshot.forwards or np.any(table.state == _LEAVING):
        return ()
    others = snapshot.prefilling[snapshot.prefilling != row]
    others = others[(table.blocks[others] > 0) & (table.flying[others] == 0)]
    return (int(others[np.lexsort((table.seq[others], table.best_effort[others]))[-1]]),) if others.size else ()


def giving_way(snapshot: Snapshot, fresh: int) -> tuple[int, ...]:
    """The best-effort reader who gives slot and blocks back, where somebody who was promised something has neither.

    The latest arrival, one at a time: nobody else does while another is on its way out.

    Args:
        fresh: blocks that prompts may take.
    """
    table = snapshot.table
    readers = snapshot.running[table.best_effort.take(snapshot.running)]
    promised = snapshot.waiting[~table.best_effort.take(snapshot.waiting)]
    if not (readers.size and promised.size) or np.any(table.state == _LEAVING):
        return ()
    wanted = -(-int(table.known[promised[0]]) // snapshot.block_tokens)
    if snapshot.free_slots and fresh >= wanted:
        return ()
    return (int(readers[table.seq.take(readers).argmax()]),)
