"""Per-token deadlines: how long a reader can wait for the next token."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from smpart.scheduler.snapshot import Rows
from smpart.scheduler.table import RequestTable

Floats = NDArray[np.float64]

_AIM = 0.97
"""Share of the TPOT objective that the pace is set to, so that errors of prediction stay inside the objective."""
_ANSWER = 128
"""Tokens of an answer, before anything is known of them."""
BEST_EFFORT_GAPS = 10.0
"""A best-effort reader is owed a token every so many ITL objectives."""


class Readers:
    """Rows that take a step together, and what of them stays the same from step to step.

    Attributes:
        tuple: the rows again, as a plan wants them.
        tpot, itl: the tightest objectives among them, seconds; best-effort rows count only if there are no others.
    """

    __slots__ = (
        "_aim",
        "_best_effort",
        "_context",
        "_first",
        "_itl",
        "_seqs",
        "_tpot",
        "itl",
        "rows",
        "tpot",
        "tuple",
    )

    def __init__(self, table: RequestTable, rows: Rows) -> None:
        self.rows = rows
        self.tuple = tuple(rows.tolist())
        self._seqs = table.seq.take(rows)
        computed = table.computed.take(rows)
        self._context = int(np.add.reduce(computed, dtype=np.int64)) + len(rows)
        self._first = int(computed[0]) if len(rows) else 0
        self._tpot, self._itl = table.tpot.take(rows), table.itl.take(rows)
        self._aim = _AIM * self._tpot
        effort = table.best_effort.take(rows)
        self._best_effort = effort if np.count_nonzero(effort) else None
        counts = slice(None) if self._best_effort is None or effort.all() else ~effort
        self.tpot = float(np.minimum.reduce(self._tpot[counts])) if len(rows) else np.inf
        self.itl = float(np.minimum.reduce(self._itl[counts])) if len(rows) else np.inf

    def still(self, table: RequestTable, rows: Rows) -> Readers:
        """These if they are still the same requests, else new ones."""
        same = rows.tobytes() == self.rows.tobytes() and table.seq.take(rows).tobytes() == self._seqs.tobytes()
        return self if same else Readers(table, rows)

    def context(self, table: RequestTable) -> int:
        """Tokens that the next step attends to, in all: the rows grow together, one token a step."""
        if not self.tuple:
            return 0
        return self._context + len(self.tuple) * (int(table.computed[self.tuple[0]]) - self._first)

    def latest(self, table: RequestTable, start: float, fastest: float) -> Floats:
        """When each row's next token has to be there whatever its pace: no gap is longer than its ITL objective.

        Nothing is due earlier than the whole device could deliver it; a row whose pace the whole device cannot hold
        is owed twice what the device can do: it is lost, but not stalled.

        Args:
            start: when the step now in flight ends, the last of the rows' launched tokens with it (now, if none is).
            fastest: seconds of the next step on the whole device.
        """
        gaps = self._itl
        if self.tpot < fastest:
            gaps = np.where(self._tpot < fastest, np.maximum(2.0 * fastest, gaps), gaps)
        if self._best_effort is not None:
            gaps = np.where(self._best_effort, BEST_EFFORT_GAPS * self._itl, gaps)
        due: Floats = self._previous(table, table.ahead.take(self.rows), start) + gaps
        return np.fmax(due, start + 1.15 * fastest, out=due)

    def pace(self, table: RequestTable) -> tuple[Floats, float]:
        """When each row's next token would be in step with its TPOT objective (never for best effort), and the share
        of answers that end at any one token, by how long those are that go on."""
        said = table.ahead.take(self.rows) + table.outputs.take(self.rows)
        pace: Floats = said * self._aim
        pace += table.first_token.take(self.rows)
        if self._best_effort is not None:
            pace[self._best_effort] = np.inf
        return pace, (len(said) + 1) / (int(np.add.reduce(said)) + _ANSWER)

    def _previous(self, table: RequestTable, ahead: NDArray[np.int32], start: float) -> float | Floats:
        """When each row has the token before the next one."""
        flying = np.count_nonzero(ahead)
        if flying == len(ahead):
            return start
        previous: Floats = table.last_token.take(self.rows)
        return np.where(ahead > 0, start, previous) if flying else previous
