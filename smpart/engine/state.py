"""Everything an engine core knows: requests and what they hold, lanes and what flies on them."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable

import numpy as np
from numpy.typing import NDArray

from smpart.engine.crossing import Crossing
from smpart.engine.flight import Forward, LaneTrack
from smpart.engine.log import RunLog
from smpart.engine.request import FinishReason, Request
from smpart.engine.residency import Residency
from smpart.kvcache import BlockPool
from smpart.partition import Lanes, Line, Shape, Side
from smpart.predictor.estimate import NOTHING, Predictor
from smpart.runtime.board import Noticeboard
from smpart.scheduler.table import RequestTable, State

WAITING, PREFILL, RUNNING, LEAVING, CROSSING = map(
    int, (State.WAITING, State.PREFILL, State.RUNNING, State.LEAVING, State.CROSSING)
)
"""Plain numbers: looking a member up in its enumeration costs more than the comparison it is for."""


class EngineState:
    """Shared by the parts of one core: `Launcher` adds flights, `Digest` takes them off, `EngineCore` decides.

    Attributes:
        requests: live requests by row. A row outlives its request while something in flight may write its blocks.
        rows: row of each live request, by the request's number.
        tracks: each lane's flights and past.
        forwards: started prefill forwards, oldest first.
        dropped: forwards that the prefill lane's body shall forget, told with its next work.
        known_samplers: by body (see `Lanes.body`), `RequestTable.seq` of the request whose sampler it knows, for each
            slot: int64[slots], -1 for none.
        numbers: arrival, forward and work numbers.
        finished: requests that ended in this turn.
        eos: end-of-sequence token ids.
        crossing: how KV gets to the device that decodes, where each lane has its own; None: both share one memory.
        prefilled: the state of a row whose prompt is computed.
    """

    def __init__(
        self,
        lanes: Lanes,
        predictor: Predictor,
        pool: BlockPool,
        board: Noticeboard,
        *,
        eos: frozenset[int],
        prefix_cache: bool,
        crossing: Crossing | None = None,
    ) -> None:
        self.lanes = lanes
        self.predictor = predictor
        self.pool = pool
        self.eos = eos
        self.crossing = crossing
        self.prefilled = RUNNING if crossing is None else CROSSING
        self.table = RequestTable()
        self.residency = Residency(self.table, pool, board, prefix_cache)
        self.log = RunLog()
        self.line = Line(lanes.splits()[-1], lanes.disjoint)
        self.shared = frozenset(lanes.overlapping())
        self.tracks = {side: LaneTrack() for side in Side}
        self.requests: dict[int, Request] = {}
        self.rows: dict[int, int] = {}
        self.forwards: dict[int, Forward] = {}
        self.dropped: list[int] = []
        self.known_samplers: dict[Hashable, NDArray[np.int64]] = {}
        self.numbers = itertools.count(1)
        self.finished: list[Request] = []

    def busy(self) -> bool:
        """Whether anything is in flight."""
        return any(track.flights for track in self.tracks.values()) or self.lands is not None

    def beside(self, side: Side) -> Shape:
        """What the other side's work is that slows one of this side down; the empty shape: nothing."""
        flights = self.tracks[side.other].flights
        return flights[0].work.shape if flights and self.crossing is None else NOTHING

    @property
    def lands(self) -> float | None:
        """When KV next lands on the device that decodes; None: none is on the way."""
        return None if self.crossing is None else self.crossing.lands

    def pull(self, rows: Iterable[int]) -> bool:
        """Send rows' KV to the device that decodes, as long as it has room; whether any is on its way now."""
        table, begun = self.table, False
        for row in rows:
            if self.crossing is None or table.state[row] != CROSSING or table.flying[row]:
                continue
            if self.crossing.begin(row, int(table.computed[row]), self.lanes.now()):
                table.flying[row] += 1
                begun = True
        return begun

    def land(self) -> None:
        """Rows whose KV has crossed decode from now on; blocks on the device that prefilled them are free."""
        for row, blocks in self.crossing.landed(self.lanes.now()) if self.crossing is not None else ():
            self.table.flying[row] -= 1
            self.residency.cross(row, blocks)
            if self.table.state[row] == CROSSING:
                self.table.state[row] = RUNNING
            self.settle(row)

    def end(self, row: int, reason: FinishReason, error: str | None = None) -> None:
        """A request's last event: tell its user, and free what it holds as soon as that is safe."""
        request = self.requests.pop(row)
        del self.rows[request.id]
        request.preemptions = int(self.table.preemptions[row])
        request.finish(reason, error)
        self.finished.append(request)
        waiting = self.table.state[row] == WAITING
        self.table.state[row] = LEAVING
        if waiting:
            self._forget(row)
        else:
            self.drop_dead_forward(int(self.table.forward[row]))
            self.settle(row)

    def settle(self, row: int) -> None:
        """Free a leaving row once nothing in flight may write its blocks; a preempted one waits again."""
        table = self.table
        if table.state[row] != LEAVING or table.flying[row] > 0:
            return
        self.residency.release(row)
        table.ahead[row] = 0
        table.forward[row] = -1
        if row in self.requests:
            table.state[row] = WAITING
        else:
            self._forget(row)

    def preempt(self, row: int) -> None:
        """Take a row's blocks, now or when nothing in flight may write them; it is recomputed later."""
        if self.table.state[row] in (RUNNING, PREFILL, CROSSING):
            self.table.preemptions[row] += 1
            self.log.preemptions += 1
            self.table.state[row] = LEAVING
            self.drop_dead_forward(int(self.table.forward[row]))
            self.settle(row)

    def lose_paused(self) -> None:
        """Start again what was paused in a body that is gone: with nothing in flight there, no work came back lost."""
        for forward in list(self.forwards.values()):
            if forward.body != self.lanes.body(Side.PREFILL, forward.split):
                self.drop(forward)

    def lose_memory(self) -> None:
        """What the lanes had computed is gone, and nothing is in flight: every request starts again, tokens kept."""
        for forward in list(self.forwards.values()):
            self.drop(forward)
        self.dropped.clear()
        for row in list(self.requests):
            self.preempt(row)
        self.pool.clear_cached()

    def _forget(self, row: int) -> None:
        self.residency.leave(row)
        self.table.give_back(row)

    def drop_dead_forward(self, number: int) -> None:
        """Abandon a paused forward all of whose rows are leaving."""
        forward = self.forwards.get(number)
        if forward is not None and all(self.table.state[p.row] == LEAVING for p in forward.parts):
            self.abandon(forward)

    def abandon(self, forward: Forward) -> None:
        """Drop a started forward: its rows start again, unless something of it is in flight (then it goes on)."""
        if forward.inflight:
            return
        self.dropped.append(forward.id)
        self.drop(forward)

    def drop(self, forward: Forward) -> None:
        """Forget a forward that will not be finished; nothing of it was computed."""
        self.forwards.pop(forward.id, None)
        for part in forward.parts:
            self.table.forward[part.row] = -1
            self.table.flying[part.row] -= 1
            self.table.computed[part.row] = part.start
            self.settle(part.row)
