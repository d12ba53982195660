"""A table of splits by size of the decode batch (SGLang's PD multiplexing).

Source: SGLang `multiplex/multiplexing_mixin.py`, `multiplex/pdmux_context.py` and `docs/advanced_features/
pd_multiplexing.md`. Neither objectives nor predictions enter. Simplified: the next layer group is launched when the
one before ends, not when a decode step does; where blocks run out vLLM's preemption decides, in place of SGLang's
estimate of tokens to come.

A row is chosen only when a prefill batch starts: a decode batch that shrinks or grows meanwhile changes nothing. The
table is built from the splits that exist: where SGLang steps by 8 SMs (compute capability 9) or 2 (8), so do they.
"""

from __future__ import annotations

from typing import NamedTuple

from smpart.errors import UsageError
from smpart.partition import Shape, Split
from smpart.scheduler.pair import TwoLanes, Work, nearest, proper
from smpart.scheduler.registry import Setup, register
from smpart.scheduler.snapshot import Snapshot

GROUPS = 8
"""Rows of the table, those for one phase alone included (`sm_group_num`)."""
DIVISOR = 36
"""Decode batch at which the last row is reached (`decode_bs_divisor`)."""
LEAST_DECODE = 16
"""SMs that every row leaves to decode."""
BATCH_TOKENS = 16384
"""Tokens of a prefill batch (`max_prefill_tokens`)."""


class Division(NamedTuple):
    """One row of a manual table."""

    split: Split
    threshold: int


@register("pdmux")
class Pdmux(TwoLanes):
    """``pdmux[:P/D@BATCH+...]``: a table built from the device, or one of splits and the batch each begins at.

    Of a manual table the last row whose threshold is reached counts; below the first, where SGLang leaves it undefined,
    the first. A split that does not exist stands for the one whose decode share is nearest.
    """

    pack_tokens = BATCH_TOKENS

    def __init__(self, setup: Setup) -> None:
        self.name = f"pdmux:{setup.argument}" if setup.argument else "pdmux"
        self._manual = _parse(setup.argument) if setup.argument else ()
        self._all: tuple[Split, ...] = ()
        self._rows: tuple[Split, ...] = ()
        self._batch: tuple[int, ...] = ()
        self._row = 0
        if setup.splits:
            self._rows = self._table(setup.splits)

    def split_for(self, snapshot: Snapshot, step: Shape, work: Work) -> Split:
        """The row chosen for the prefill batch."""
        if snapshot.splits != self._all:
            self._all, self._rows, self._batch = snapshot.splits, self._table(snapshot.splits), ()
        batch = work.batch(snapshot)
        if batch != self._batch:
            self._batch, self._row = batch, self._choose(step.decode_batch)
        return self._rows[self._row]

    def _table(self, splits: tuple[Split, ...]) -> tuple[Split, ...]:
        if not self._manual:
            return table(splits)
        there = proper(splits)
        return tuple(nearest(there, row.split.decode / row.split.total) for row in self._manual)

    def _choose(self, batch: int) -> int:
        if self._manual:
            return max(0, sum(row.threshold <= batch for row in self._manual) - 1)
        rows = len(self._rows) + 2
        return min(max(batch * (rows - 2) // DIVISOR, 1), rows - 2) - 1


def table(splits: tuple[Split, ...]) -> tuple[Split, ...]:
    """SGLang's rows for both phases, most prefill first: at most six, evenly spaced, prefill the larger side.

    Where no split leaves decode 16 units (cores of a CPU), every split counts in which prefill has no less than half;
    where even that leaves none, all do.
    """
    there = proper(splits)
    larger = [split for split in there if split.prefill >= split.decode]
    rows = [split for split in larger if split.decode >= LEAST_DECODE] or larger or list(there)
    rows.reverse()
    return tuple(reversed(rows[:: max(1, len(rows) // (GROUPS - 2))][: GROUPS - 2]))


def _parse(text: str) -> tuple[Division, ...]:
    divisions = []
    for part in text.split("+"):
        split, at, threshold = part.partition("@")
        if not at or not threshold.strip().isdecimal():
            raise UsageError(f"policy pdmux:{text}: write P/D@BATCH+..., for example pdmux:112/20@1+104/28@5")
        divisions.append(Division(Split.parse(split), int(threshold)))
    thresholds = [division.threshold for division in divisions]
    if any(division.split.exclusive for division in divisions):
        raise UsageError(f"policy pdmux:{text}: both sides of every split need units")
    if sorted(set(thresholds)) != thresholds:
        raise UsageError(f"policy pdmux:{text}: batch sizes must ascend")
    return tuple(divisions)
