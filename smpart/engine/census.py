"""Which rows wait, compute their prompts and decode, in order of arrival: looked up anew only when that changed."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from smpart.engine.state import PREFILL, RUNNING, WAITING
from smpart.scheduler.snapshot import Rows
from smpart.scheduler.table import RequestTable


class Census:
    """Rows of a table by state. As long as nothing changed, the arrays it gives are the same objects."""

    def __init__(self, table: RequestTable) -> None:
        self._table = table
        self._seen: tuple[int, bytes] = (-1, b"")
        self._running = self._prefilling = self.waiting = np.zeros(0, dtype=np.intp)

    @property
    def holds(self) -> bool:
        """Whether no row has come, left or changed its state since the last look."""
        return self._seen == (self._table.arrivals, self._table.state.tobytes())

    def look(self) -> None:
        """Bring it up to date."""
        if not self.holds:
            self._seen = self._table.arrivals, self._table.state.tobytes()
            state = self._table.state
            self._running, self._prefilling = self._rows(state == RUNNING), self._rows(state == PREFILL)
            self.waiting = self._rows(state == WAITING)

    @property
    def prefilling(self) -> Rows:
        """Admitted rows with tokens left to compute that are not part of a started forward."""
        rows = self._prefilling
        return rows[self._table.forward.take(rows) < 0] if len(rows) else rows

    @property
    def running(self) -> Rows:
        """Decoding rows whose output limit is not reached by what is launched."""
        table, rows = self._table, self._running
        asked = table.outputs.take(rows)
        asked += table.ahead.take(rows)
        more = asked < table.max_tokens.take(rows)
        return rows if more.all() else rows[more]

    def _rows(self, chosen: NDArray[np.bool_]) -> Rows:
        rows = chosen.nonzero()[0]
        return rows[self._table.seq.take(rows).argsort()] if len(rows) > 1 else rows
