"""Which split at which decode batch: the smallest decode share beside a prefill that holds the objective."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from smpart.partition import Split
from smpart.scheduler.pair import proper

MOST_ROWS = 8
"""Each split costs an engine a set of decode graphs."""


class Row(NamedTuple):
    """A split, and the decode batch from which it is the right one."""

    split: Split
    batch: int


class Table(NamedTuple):
    """Attributes:
    rows: decode share and batch both rising, the first from batch 1; none: no split holds the objective.
    holds: largest decode batch whose step beside a prefill holds it.
    """

    rows: tuple[Row, ...]
    holds: int


def divide(
    step_s: Callable[[int, Split], float], splits: Iterable[Split], limit_s: float, most: int, rows: int = MOST_ROWS
) -> Table:
    """The table for decode batches up to `most`.

    Args:
        step_s: an upper bound, in seconds, of a decode step of a batch beside a prefill; rises with the batch.
        limit_s: what a step may take.
        rows: at most so many, those dropped that give prefill least: their batches use the next larger decode share.

    >>> splits = [Split(p, 8 - p) for p in range(9)]
    >>> table = divide(lambda batch, split: batch / split.decode, splits, 1.0, 100, rows=3)
    >>> [(str(row.split), row.batch) for row in table.rows], table.holds
    ([('6/2', 1), ('4/4', 3), ('1/7', 5)], 7)
    """
    found: list[Row] = []
    held = 0
    for split in proper(splits):

        def seconds(batch: int, split: Split = split) -> float:
            return step_s(batch, split)

        up_to = bisect_right(range(1, most + 1), limit_s, key=seconds)
        if up_to > held:
            found.append(Row(split, held + 1))
            held = up_to
        if held == most:
            break
    return Table(_thinned(found, held, rows), held)


def _thinned(found: Sequence[Row], held: int, most: int) -> tuple[Row, ...]:
    rows = list(found)
    while len(rows) > most:
        ends = [*(row.batch for row in rows[1:]), held + 1]

        def loss(index: int, ends: list[int] = ends) -> int:
            """Units that prefill loses, summed over the batches of a row that is dropped."""
            more = rows[index + 1].split.decode - rows[index].split.decode
            return more * (ends[index] - rows[index].batch)

        dropped = min(range(len(rows) - 1), key=loss)
        rows[dropped : dropped + 2] = [Row(rows[dropped + 1].split, rows[dropped].batch)]
    return tuple(rows)
