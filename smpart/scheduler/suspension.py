"""Best-effort readers stay out of steps that others would pay for."""

from __future__ import annotations

import numpy as np

from smpart.scheduler.costs import Costs
from smpart.scheduler.pace import BEST_EFFORT_GAPS
from smpart.scheduler.packing import at_pace
from smpart.scheduler.snapshot import Rows, Snapshot


def awake(snapshot: Snapshot, costs: Costs, rows: Rows) -> Rows:
    """Of `rows`, those that take the next step.

    While somebody who was promised a first token in time waits for it, no best-effort reader does: steps are shorter
    without them, and leave more to prefill. Beside readers who were promised a pace as many do as that pace allows,
    in turns. In any case those do whose last token is `BEST_EFFORT_GAPS` ITL objectives old.
    """
    table = snapshot.table
    effort = table.best_effort.take(rows)
    if not np.count_nonzero(effort):
        return rows
    promised, places = rows[~effort], effort.nonzero()[0]
    others = rows[places]
    last = table.last_token.take(others)
    due = last + BEST_EFFORT_GAPS * table.itl.take(others) <= snapshot.now
    if _somebody_waits(snapshot):
        count = 0
    elif promised.size:
        context = int(table.computed.take(rows).sum()) + len(rows)
        tpot = float(table.tpot.take(promised).min())
        count = max(0, at_pace(snapshot, costs, len(rows), context, tpot) - len(promised))
    else:
        count = len(others)
    due[np.argsort(last, kind="stable")[:count]] = True
    steps = ~effort
    steps[places[due]] = True
    return rows[steps]


def _somebody_waits(snapshot: Snapshot) -> bool:
    """Whether anybody who was promised a first token has none."""
    forwards = [np.array(forward.rows, dtype=np.intp) for forward in snapshot.forwards]
    waiting = np.concatenate((snapshot.waiting, snapshot.prefilling, *forwards))
    return not bool(snapshot.table.best_effort.take(waiting).all())
