"""Per-token deadlines: how long a reader can wait for the next token."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from smpart.scheduler.snapshot import Rows
from smpart.scheduler.table import RequestTable

_AIM = 0.97
"""Share of the TPOT objective that the pace is set to, so that errors of prediction stay inside the objective."""
_CATCH_UP = 0.9
"""A reader behind the pace is owed gaps of this share of the objective."""
_BEST_EFFORT_GAPS = 10.0
"""A best-effort reader is owed a token every so many ITL objectives."""


def token_deadlines(table: RequestTable, rows: Rows, start: float, fastest: float) -> NDArray[np.float64]:
    """When the next token of each row that is not launched yet has to be there; seconds on the engine's clock.

    A row ahead of its reading pace (first token + n × TPOT) has slack up to its ITL objective; a row behind it must
    catch up; nothing is due earlier than the whole device could deliver it. A row whose pace the whole device cannot
    hold is owed twice what the device can do: it is lost, but not stalled.

    Args:
        start: when the step now in flight ends, the last of the rows' launched tokens with it (now, if none is).
        fastest: seconds of the next step on the whole device.
    """
    ahead, tpot, itl = table.ahead[rows], table.tpot[rows], table.itl[rows]
    previous = np.where(ahead > 0, start, table.last_token[rows])
    pace = table.first_token[rows] + (table.outputs[rows] + ahead) * (tpot * _AIM)
    gaps = _CATCH_UP * tpot
    if tpot.min() < fastest:
        gaps[tpot < fastest] = 2.0 * fastest
    owed = previous + gaps
    due = np.minimum(np.fmax(pace, owed), np.maximum(previous + itl, owed))
    effort = table.best_effort[rows]
    if effort.any():
        due = np.where(effort, previous + _BEST_EFFORT_GAPS * itl, due)
    deadlines: NDArray[np.float64] = np.fmax(due, start + 1.15 * fastest)
    return deadlines
