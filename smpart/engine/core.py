"""The loop: wait for what ended, show the policy a snapshot, launch what it plans.

The same core runs in real time (lanes of worker processes or threads) and in virtual time (simulated lanes):
only the lanes and their clock differ.
"""

from __future__ import annotations

import itertools
import math
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from smpart.engine.digest import Digest
from smpart.engine.flight import Flight, Forward, LaneTrack, Part
from smpart.engine.log import RunLog
from smpart.engine.request import FinishReason, Request
from smpart.engine.residency import Residency
from smpart.errors import SmpartError, UsageError
from smpart.kvcache import BlockPool
from smpart.partition import Lanes, Line, Shape, Side, Split, Work
from smpart.predictor.estimate import Predictor
from smpart.runtime.batch import Batch, Chunk, Sampler, Segment
from smpart.runtime.board import Noticeboard
from smpart.runtime.sampling import SamplingParams
from smpart.scheduler.plan import Piece, Plan, Policy, ResumePrefill, StartPrefill, Step
from smpart.scheduler.snapshot import LaneView, Snapshot
from smpart.scheduler.table import RequestTable, State

_ROUNDS = 4
"""Plans made for one event at most: each launches at most one work a lane."""

_WAITING, _PREFILL, _RUNNING, _LEAVING = map(int, (State.WAITING, State.PREFILL, State.RUNNING, State.LEAVING))
"""Plain numbers: looking a member up in its enumeration costs more than the comparison it is for."""


class EngineCore:
    """Serves requests on a pair of lanes under a policy. Not thread-safe: one thread calls it.

    Args:
        lead_s: how long before a lane is predicted to run dry its next work may be planned and launched. Later is
            better informed; earlier hides the way to the worker. `inf` launches one work ahead at once, `-inf` only
            when the lane is idle.
        layers: decoder layers of the model.
        max_paused: started and unfinished prefill forwards at once.
        eos: end-of-sequence token ids.
    """

    def __init__(
        self,
        lanes: Lanes,
        policy: Policy,
        predictor: Predictor,
        pool: BlockPool,
        board: Noticeboard,
        *,
        layers: int,
        lead_s: float,
        eos: frozenset[int] = frozenset(),
        prefix_cache: bool = True,
        max_paused: int = 4,
        seed: int = 0,
    ) -> None:
        self.lanes = lanes
        self.policy = policy
        self.predictor = predictor
        self.pool = pool
        self.table = RequestTable()
        self.residency = Residency(self.table, pool, board, prefix_cache)
        self.requests: dict[int, Request] = {}
        self.log = RunLog()
        self._board = board
        self._splits = lanes.splits()
        self.line = Line(lanes.device.units, self._splits[-1])
        self._layers = layers
        self._lead = lead_s
        self.eos = eos
        self._max_paused = max_paused
        self._seeds = np.random.default_rng(seed)
        self.tracks = {side: LaneTrack() for side in Side}
        self.forwards: dict[int, Forward] = {}
        self._known_samplers: dict[Side, dict[int, int]] = {side: {} for side in Side}
        self._numbers = itertools.count(1)
        self._rows: dict[int, int] = {}
        self._dropped: list[int] = []
        self._dirty = False
        self._valid_until: float | None = None
        self._finished: list[Request] = []
        self._digest = Digest(self)

    # ---- what callers do

    def now(self) -> float:
        """Seconds on the lanes' clock."""
        return self.lanes.now()

    @property
    def idle(self) -> bool:
        """Whether nothing is waiting, running or in flight."""
        return not self.requests and not any(track.flights for track in self.tracks.values())

    def check(self, request: Request) -> None:
        """Raise `UsageError` for a request that can never be served here."""
        prompt, total = len(request.prompt), len(request.prompt) + request.params.max_tokens
        if prompt == 0:
            raise UsageError("empty prompt: give at least one token")
        if total > self._board.max_len:
            raise UsageError(
                f"prompt of {prompt} tokens + max_tokens={request.params.max_tokens} is over the limit of "
                f"{self._board.max_len} tokens: shorten one of them or raise KVConfig.max_len"
            )
        needed = -(-(total - 1) // self.pool.block_tokens)
        if needed > self.pool.blocks:
            raise UsageError(
                f"request of {total} tokens needs {needed} KV blocks, the whole pool has {self.pool.blocks}: "
                "shorten it or give the engine more KV memory"
            )

    def add(self, request: Request) -> None:
        """Take a request in. Raises `UsageError` if it can never be served."""
        self.check(request)
        now = self.now()
        if request.arrival is None:
            request.arrival = now
        request.seed = int(self._seeds.integers(2**63)) if request.params.seed is None else request.params.seed
        table, row = self.table, self.table.take()
        table.seq[row] = next(self._numbers)
        table.arrival[row] = request.arrival
        table.ttft_deadline[row] = request.arrival + request.slo.ttft_ms / 1e3
        table.tpot[row] = request.slo.tpot_ms / 1e3
        table.itl[row] = request.slo.itl_ms / 1e3
        table.best_effort[row] = request.best_effort
        table.prompt[row] = table.known[row] = len(request.prompt)
        table.max_tokens[row] = request.params.max_tokens
        table.state[row] = _WAITING
        self.requests[row] = request
        self._rows[request.id] = row
        self.residency.arrive(row, request)
        self._dirty = True

    def cancel(self, request: Request) -> None:
        """End a request now; its blocks are freed once no launched work can write them."""
        row = self._rows.get(request.id)
        if row is not None and self.requests.get(row) is request:
            self.end(row, FinishReason.CANCELLED)
            self._dirty = True

    def fail_all(self, message: str) -> None:
        """End every request with an error (the lanes are gone)."""
        for row in list(self.requests):
            request = self.requests.pop(row)
            self._rows.pop(request.id, None)
            request.finish(FinishReason.ERROR, message)

    def turn(self, until: float | None = None) -> list[Request]:
        """One turn of the loop; returns the requests that ended.

        Waits for a completion, but at most until the clock reads `until` (None: as long as it takes), then plans
        and launches. Raises `SmpartError` if the policy leaves work lying with nothing to wait for.
        """
        limit = self.now() if self._dirty else self._wait_limit(until)
        self._dirty = False
        self._digest.take(self.lanes.wait(limit))
        launched = self._decide()
        if not launched and until is None:
            self._refuse_to_stall()
        finished, self._finished = self._finished, []
        return finished

    # ---- one decision

    def _decide(self) -> bool:
        """Plan, and plan again while the last plan freed something or left room behind its own launch."""
        acted = False
        for _ in range(_ROUNDS):
            self._note_readiness()
            if not self.requests or not any(self._room(side) for side in Side):
                break
            begun = perf_counter()
            plan = self.policy.plan(self._snapshot())
            self.log.decision_seconds.append(perf_counter() - begun)
            freed = self._make_way(plan)
            launched = self._launch_all(plan)
            acted |= freed or bool(launched)
            if not (any(self._room(side) for side in launched) or (freed and not launched)):
                break
        return acted

    def _snapshot(self) -> Snapshot:
        table = self.table
        state = table.state
        running = self._in_order((state == _RUNNING) & (table.outputs + table.ahead < table.max_tokens))
        prefilling = self._in_order((state == _PREFILL) & (table.forward < 0))
        waiting = self._in_order(state == _WAITING)
        self.residency.refresh(waiting)
        return Snapshot(
            now=self.now(),
            table=table,
            waiting=waiting,
            prefilling=prefilling,
            running=running,
            forwards=tuple(f.view() for f in self.forwards.values()),
            prefill_lane=self._lane_view(Side.PREFILL),
            decode_lane=self._lane_view(Side.DECODE),
            split=self.line.target,
            splits=self._splits,
            free_blocks=self.pool.free,
            block_tokens=self.pool.block_tokens,
            free_slots=self.residency.free_slots,
            layers=self._layers,
            max_paused=self._max_paused,
            predictor=self.predictor,
        )

    def _in_order(self, chosen: NDArray[np.bool_]) -> NDArray[np.intp]:
        """Rows of a mask, in order of arrival."""
        rows = chosen.nonzero()[0]
        return rows[self.table.seq[rows].argsort()] if len(rows) > 1 else rows

    def _lane_view(self, side: Side) -> LaneView:
        flights = self.tracks[side].flights
        if not flights:
            return LaneView(self._room(side), 0, self.now(), Shape())
        return LaneView(self._room(side), len(flights), max(self.now(), flights[-1].expected), flights[-1].work.shape)

    def _room(self, side: Side) -> int:
        flights = self.tracks[side].flights
        if not flights:
            return 1
        if len(flights) >= self.lanes.depth or self.now() < flights[-1].expected - self._lead:
            return 0
        return 1

    def _make_way(self, plan: Plan) -> bool:
        """Move the line and take away what the plan takes away; whether anything was freed."""
        self._valid_until = plan.valid_until
        if plan.split != self.line.target:
            self.line.target = plan.split
            self.log.resizes += 1
            self.log.reasons.append((self.now(), plan.split, plan.reason))
        for row, why in plan.refuse:
            self.end(row, FinishReason.REFUSED, why)
        for forward in plan.abandon:
            self._abandon(self.forwards[forward])
        for row in plan.preempt:
            self._preempt(row)
        return bool(plan.refuse or plan.abandon or plan.preempt)

    def _launch_all(self, plan: Plan) -> list[Side]:
        """Launch what the plan launches; the sides it was launched on."""
        launched = []
        if plan.step is not None and self._launch_step(plan.step):
            launched.append(Side.DECODE)
        match plan.prefill:
            case StartPrefill() as start if self._start_prefill(start):
                launched.append(Side.PREFILL)
            case ResumePrefill(number, layers) if self._launch_group(self.forwards[number], layers):
                launched.append(Side.PREFILL)
        return launched

    # ---- launching

    def _launch_step(self, step: Step) -> bool:
        split = self._grant(Side.DECODE)
        if split is None or (step.pieces and (not split.exclusive or self.forwards)):
            return False
        table = self.table
        rows = self.residency.grow(np.asarray(step.rows, dtype=np.intp))
        parts = tuple(part for piece in step.pieces if (part := self._place(piece)) is not None)
        if not len(rows) and not parts:
            return False
        batch = Batch(table.slot[rows], table.computed[rows], self._chunks(parts))
        context = int(table.computed[rows].sum()) + len(rows)
        shape = Shape.decode(len(rows), context).join(Shape.prefill((p.length, p.start) for p in parts))
        number = next(self._numbers)
        segment = Segment(number, batch, samplers=self._new_samplers(Side.DECODE, rows.tolist(), parts))
        self._launch(Side.DECODE, split, shape, 1.0, segment, tuple(rows.tolist()), parts, None, last=True)
        table.computed[rows] += 1
        table.ahead[rows] += 1
        table.flying[rows] += 1
        for part in parts:
            table.flying[part.row] += 1
            if part.sample:  # the next step on this lane may already decode it: works of one lane run in order
                table.state[part.row] = _RUNNING
                table.ahead[part.row] = 1
        return True

    def _start_prefill(self, start: StartPrefill) -> bool:
        if self._grant(Side.PREFILL) is None or len(self.forwards) >= self._max_paused:
            return False
        parts = tuple(part for piece in start.pieces if (part := self._place(piece)) is not None)
        if not parts:
            return False
        shape = Shape.prefill((p.length, p.start) for p in parts)
        forward = Forward(next(self._numbers), parts, shape, self._layers, self.now())
        self.forwards[forward.id] = forward
        for part in parts:
            self.table.forward[part.row] = forward.id
            self.table.flying[part.row] += 1
        return self._launch_group(forward, start.layers, Batch(_NO_ROWS, _NO_ROWS, self._chunks(parts)))

    def _launch_group(self, forward: Forward, layers: int | None, batch: Batch | None = None) -> bool:
        split = self._grant(Side.PREFILL)
        if split is None or forward.layers_left == 0:
            return False
        count = forward.layers_left if layers is None else max(1, min(layers, forward.layers_left))
        last = count == forward.layers_left
        samplers = self._new_samplers(Side.PREFILL, [], forward.parts) if last else {}
        segment = Segment(forward.id, batch, None if last else count, tuple(self._dropped), samplers)
        self._dropped.clear()
        forward.layers_left -= count
        forward.inflight += 1
        fraction = count / self._layers
        self._launch(Side.PREFILL, split, forward.shape, fraction, segment, (), forward.parts, forward, last=last)
        return True

    def _launch(
        self,
        side: Side,
        split: Split,
        shape: Shape,
        fraction: float,
        segment: Segment,
        rows: tuple[int, ...],
        parts: tuple[Part, ...],
        forward: Forward | None,
        *,
        last: bool,
    ) -> None:
        track, beside = self.tracks[side], self.tracks[side.other].flights
        neighbour = beside[0].work.shape if beside else Shape()
        work = Work(next(self._numbers), side, split, shape, fraction, segment)
        mean = self.predictor.predict(shape, work.units, neighbour).mean * fraction
        begins = max(self.now(), track.flights[-1].expected) if track.flights else self.now()
        flight = Flight(work, rows, parts, forward, last, begins + mean, track.ready_since, bool(track.flights))
        track.flights.append(flight)
        track.ready_since = None
        self.line.launched(work.id, side, split)
        self.lanes.launch(work)

    def _grant(self, side: Side) -> Split | None:
        return self.line.grant(side) if self._room(side) else None

    def _place(self, piece: Piece) -> Part | None:
        """Blocks (and a slot) for a piece; None if it cannot be launched now."""
        table, row = self.table, piece.row
        request = self.requests[row]
        if table.state[row] == _WAITING:
            if not self.residency.free_slots:
                return None
            end = min(int(table.cached[row]) + piece.length, int(table.known[row]))
            self.residency.admit(row, request)
            end = max(end, int(table.computed[row]) + 1)
            if not self.residency.ensure(row, end):
                self.residency.release(row)
                return None
            table.state[row] = _PREFILL
        else:
            end = min(int(table.computed[row]) + piece.length, int(table.known[row]))
            if table.forward[row] >= 0 or not self.residency.ensure(row, end):
                return None
        start = int(table.computed[row])
        table.computed[row] = end
        return Part(row, start, end - start, sample=end == int(table.known[row]))

    def _chunks(self, parts: tuple[Part, ...]) -> tuple[Chunk, ...]:
        return tuple(Chunk(int(self.table.slot[p.row]), p.start, p.length, p.sample) for p in parts)

    def _new_samplers(self, side: Side, rows: list[int], parts: tuple[Part, ...]) -> dict[int, Sampler]:
        """What the lane must learn about requests it is to sample for the first time."""
        met = self._known_samplers[side]
        fresh: dict[int, Sampler] = {}
        for row in itertools.chain(rows, (p.row for p in parts if p.sample)):
            slot, request = int(self.table.slot[row]), self.requests.get(row)
            if request is None:  # it ended while its forward was under way; what is sampled for it goes nowhere
                fresh[slot] = _NOBODY
                met.pop(slot, None)
            elif met.get(slot) != request.id:
                met[slot] = request.id
                fresh[slot] = Sampler(request.params, len(request.prompt), request.seed)
        return fresh

    # ---- ends

    def end(self, row: int, reason: FinishReason, error: str | None = None) -> None:
        """A request's last event: tell its user, and free what it holds as soon as that is safe."""
        request = self.requests.pop(row)
        del self._rows[request.id]
        request.preemptions = int(self.table.preemptions[row])
        request.finish(reason, error)
        self._finished.append(request)
        waiting = self.table.state[row] == _WAITING
        self.table.state[row] = _LEAVING
        if waiting:
            self._forget(row)
        else:
            self.drop_dead_forward(int(self.table.forward[row]))
            self.settle(row)

    def settle(self, row: int) -> None:
        """Free a leaving row once nothing in flight may write its blocks; a preempted one waits again."""
        table = self.table
        if table.state[row] != _LEAVING or table.flying[row] > 0:
            return
        self.residency.release(row)
        table.ahead[row] = 0
        table.forward[row] = -1
        if row in self.requests:
            table.state[row] = _WAITING
        else:
            self._forget(row)

    def _preempt(self, row: int) -> None:
        if self.table.state[row] in (_RUNNING, _PREFILL):
            self.table.preemptions[row] += 1
            self.log.preemptions += 1
            self.table.state[row] = _LEAVING
            self.drop_dead_forward(int(self.table.forward[row]))
            self.settle(row)

    def _forget(self, row: int) -> None:
        self.residency.leave(row)
        self.table.give_back(row)

    def forget_samplers(self, side: Side) -> None:
        """A new worker on that side has met no request."""
        self._known_samplers[side].clear()

    def drop_dead_forward(self, number: int) -> None:
        """Abandon a paused forward all of whose rows are leaving."""
        forward = self.forwards.get(number)
        if forward is not None and all(self.table.state[p.row] == _LEAVING for p in forward.parts):
            self._abandon(forward)

    def _abandon(self, forward: Forward) -> None:
        """Drop a started forward: its rows start again, unless something of it is in flight (then it goes on)."""
        if forward.inflight:
            return
        self._dropped.append(forward.id)
        self.drop(forward)

    def drop(self, forward: Forward) -> None:
        """Forget a forward that will not be finished; nothing of it was computed."""
        self.forwards.pop(forward.id, None)
        for part in forward.parts:
            self.table.forward[part.row] = -1
            self.table.flying[part.row] -= 1
            self.table.computed[part.row] = part.start
            self.settle(part.row)

    # ---- waiting

    def _wait_limit(self, until: float | None) -> float | None:
        limits = [] if until is None else [until]
        if self._valid_until is not None and self._valid_until > self.now():
            limits.append(self._valid_until)
        for track in self.tracks.values():
            if track.flights and len(track.flights) < self.lanes.depth:
                moment = track.flights[-1].expected - self._lead
                if self.now() < moment < math.inf:
                    limits.append(moment)
        return min(limits) if limits else None

    def _note_readiness(self) -> None:
        """Since when an idle lane that owns units has had work waiting (the bubble it may later show)."""
        for side, track in self.tracks.items():
            if track.flights or self.line.target.units(side) == 0 or not self._has_work(side):
                track.ready_since = None if not track.flights else track.ready_since
            elif track.ready_since is None:
                track.ready_since = self.now()

    def _has_work(self, side: Side) -> bool:
        state = self.table.state
        if side is Side.DECODE:
            return bool((state == _RUNNING).any())
        return bool(self.forwards) or bool(((state == _PREFILL) | (state == _WAITING)).any())

    def _refuse_to_stall(self) -> None:
        busy = any(track.flights for track in self.tracks.values())
        if self.requests and not busy and self._valid_until is None and not self._finished:
            raise SmpartError(
                f"policy {self.policy.name!r} plans nothing for {len(self.requests)} requests: a bug in it"
            )


_NO_ROWS = np.zeros(0, dtype=np.int32)
_NOBODY = Sampler(SamplingParams(), 1, 0)
