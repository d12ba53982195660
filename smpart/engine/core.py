"""The loop: wait for what ended, show the policy a snapshot, launch what it plans.

The same core runs in real time (lanes of worker processes or threads) and in virtual time (simulated lanes):
only the lanes and their clock differ.
"""

from __future__ import annotations

import math
from time import perf_counter

import numpy as np

from smpart.engine.census import Census
from smpart.engine.crossing import Crossing
from smpart.engine.digest import Digest
from smpart.engine.launcher import Launcher
from smpart.engine.log import RunLog
from smpart.engine.request import FinishReason, Request
from smpart.engine.state import PREFILL, RUNNING, WAITING, EngineState
from smpart.errors import SmpartError, UsageError
from smpart.kvcache import BlockPool
from smpart.partition import Lanes, Shape, Side
from smpart.predictor.estimate import Predictor
from smpart.runtime.board import Noticeboard
from smpart.scheduler.plan import Plan, Policy, ResumePrefill, StartPrefill
from smpart.scheduler.snapshot import LaneView, Snapshot

_ROUNDS = 4
"""Plans made for one event at most: each launches at most one work a lane."""

_SIDES = tuple(Side)


class EngineCore:
    """Serves requests on a pair of lanes under a policy. Not thread-safe: one thread calls it.

    Args:
        lead_s: how long before a lane is predicted to run dry its next work may be planned and launched. Later is
            better informed; earlier hides the way to the worker. `inf` launches one work ahead at once, `-inf` only
            when the lane is idle.
        layers: decoder layers of the model.
        max_paused: started and unfinished prefill forwards at once.
        crossing: the memory of the device that decodes and the way to it, where `lanes` are two devices; `pool` is then
            that of the device that prefills.
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
        crossing: Crossing | None = None,
        seed: int = 0,
    ) -> None:
        self.state = EngineState(lanes, predictor, pool, board, eos=eos, prefix_cache=prefix_cache, crossing=crossing)
        self.policy = policy
        self._board = board
        self._splits, self._overlapping = lanes.splits(), lanes.overlapping()
        bodies = {lanes.body(Side.PREFILL, split) for split in self._splits if split.prefill}
        # A paused forward lives in one body; where a new split means another one, forwards come in one piece.
        self._launcher = Launcher(self.state, layers if len(bodies) <= 1 else 1, lead_s, max_paused)
        self._digest = Digest(self.state)
        self._census = Census(self.state.table)
        self._seeds = np.random.default_rng(seed)
        self._dirty = False
        self._steady = False
        self._onward = 0  # layers of the next group that needs no decision
        self._valid_until: float | None = None
        self._epoch = lanes.epoch

    # ---- what callers do

    def now(self) -> float:
        """Seconds on the lanes' clock."""
        return self.state.lanes.now()

    @property
    def idle(self) -> bool:
        """Whether nothing is waiting, running or in flight."""
        return not self.state.requests and not self.state.busy()

    @property
    def log(self) -> RunLog:
        """Spans, counters and where time was lost."""
        return self.state.log

    @property
    def drifted(self) -> str | None:
        """See `Predictor.drifted`."""
        return self.state.predictor.drifted

    @property
    def devices(self) -> int:
        """Devices it serves on."""
        return 1 if self.state.crossing is None else 2

    @property
    def lanes(self) -> Lanes:
        """The lanes it serves on."""
        return self.state.lanes

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
        needed = -(-(total - 1) // self.state.pool.block_tokens)
        if needed > self.state.pool.blocks:
            raise UsageError(
                f"request of {total} tokens needs {needed} KV blocks, the whole pool has {self.state.pool.blocks}: "
                "shorten it or give the engine more KV memory"
            )

    def add(self, request: Request) -> None:
        """Take a request in. Raises `UsageError` if it can never be served."""
        self.check(request)
        now = self.now()
        if request.arrival is None:
            request.arrival = now
        silent = request.listener is None and request.text is None
        request.unwatched = silent and request.params.ignore_eos and not request.params.stop_token_ids
        request.seed = int(self._seeds.integers(2**63)) if request.params.seed is None else request.params.seed
        table, row = self.state.table, self.state.table.take()
        table.seq[row] = next(self.state.numbers)
        table.arrival[row] = request.arrival
        table.ttft_deadline[row] = request.arrival + request.slo.ttft_ms / 1e3
        table.tpot[row] = request.slo.tpot_ms / 1e3
        table.itl[row] = request.slo.itl_ms / 1e3
        table.best_effort[row] = request.best_effort
        table.prompt[row] = table.known[row] = len(request.prompt)
        table.max_tokens[row] = request.params.max_tokens
        try:
            self.state.residency.arrive(row, request)
        except BaseException:
            self.state.residency.leave(row)
            table.give_back(row)
            raise
        table.state[row] = WAITING
        self.state.requests[row] = request
        self.state.rows[request.id] = row
        self._dirty = True

    def cancel(self, request: Request) -> None:
        """End a request now; its blocks are freed once no launched work can write them."""
        row = self.state.rows.get(request.id)
        if row is not None and self.state.requests.get(row) is request:
            self.state.end(row, FinishReason.CANCELLED)
            self._dirty = True

    def fail_all(self, message: str) -> None:
        """End every request with an error (the lanes are gone)."""
        for row in list(self.state.requests):
            request = self.state.requests.pop(row)
            self.state.rows.pop(request.id, None)
            request.finish(FinishReason.ERROR, message)

    def turn(self, until: float | None = None) -> list[Request]:
        """One turn of the loop; returns the requests that ended.

        Waits for a completion, but at most until the clock reads `until` (None: as long as it takes), then plans
        and launches. Raises `SmpartError` if the policy leaves work lying with nothing to wait for.
        """
        limit = self.now() if self._dirty else self._wait_limit(until)
        self._dirty = False
        self._digest.take(self.state.lanes.wait(limit))
        self.state.land()
        if self.state.lanes.epoch != self._epoch:
            self._epoch = self.state.lanes.epoch
            self.state.lose_memory()
        self.state.lose_paused()
        launched = self._go_on()
        if not launched and until is None:
            self._refuse_to_stall()
        finished, self.state.finished = self.state.finished, []
        return finished

    # ---- one decision

    def _go_on(self) -> bool:
        """Go on with the last plan as long as it says so, or decide; whether anything was launched or freed."""
        if not (self._steady or self._onward):
            return self._decide()
        begun = perf_counter()
        expired = self._valid_until is not None and self._valid_until <= self.now()
        holds = not expired and self._census.holds
        self.state.log.decision_seconds.append(perf_counter() - begun)
        if not holds:
            return self._decide()
        return self._step_again() if self._steady else self._onwards() or self._decide()

    def _step_again(self) -> bool:
        """Let a steady step follow itself."""
        launched = False
        while self._launcher.room(Side.DECODE):
            if not self._launcher.again():
                return self._decide() or launched
            launched = True
        return launched

    def _onwards(self) -> bool:
        """Let the only forward go on by as many layers as before, beside the step under way."""
        forwards, room = self.state.forwards, self._launcher.room
        if len(forwards) != 1 or room(Side.DECODE) or not room(Side.PREFILL):
            return False
        (forward,) = forwards.values()
        return self._launcher.group(forward, self._onward)

    def _decide(self) -> bool:
        """Plan, and plan again while the last plan freed something or left room behind its own launch."""
        acted = self._steady = False
        self._onward = 0
        for _ in range(_ROUNDS):
            self._note_readiness()
            if not self.state.requests or not any(map(self._launcher.room, _SIDES)):
                break
            begun = perf_counter()
            plan = self.policy.plan(self._snapshot())
            self.state.log.decision_seconds.append(perf_counter() - begun)
            freed = self._make_way(plan)
            acted |= self.state.pull(plan.pull)
            launched = self._launch_all(plan)
            acted |= freed or bool(launched)
            self._steady = plan.steady and launched == [Side.DECODE] and self._launcher.cohort is not None
            self._onward = plan.prefill.layers or 0 if plan.onward and plan.prefill and Side.PREFILL in launched else 0
            if not (any(self._launcher.room(side) for side in launched) or (freed and not launched)):
                break
        return acted

    def _snapshot(self) -> Snapshot:
        table, census = self.state.table, self._census
        census.look()
        self.state.residency.refresh(census.waiting)
        return Snapshot(
            now=self.now(),
            table=table,
            waiting=census.waiting,
            prefilling=census.prefilling,
            running=census.running,
            forwards=tuple(f.view() for f in self.state.forwards.values()),
            prefill_lane=self._lane_view(Side.PREFILL),
            decode_lane=self._lane_view(Side.DECODE),
            split=self.state.line.target,
            splits=self._splits,
            free_blocks=self.state.pool.free,
            block_tokens=self.state.pool.block_tokens,
            free_slots=self.state.residency.free_slots,
            layers=self._launcher.layers,
            max_paused=self._launcher.max_paused,
            predictor=self.state.predictor,
            overlapping=self._overlapping,
            decode_blocks=None if self.state.crossing is None else self.state.crossing.pool.free,
        )

    def _lane_view(self, side: Side) -> LaneView:
        flights = self.state.tracks[side].flights
        if not flights:
            return LaneView(self._launcher.room(side), 0, self.now(), Shape())
        return LaneView(
            self._launcher.room(side), len(flights), max(self.now(), flights[-1].expected), flights[-1].work.shape
        )

    def _make_way(self, plan: Plan) -> bool:
        """Move the line and take away what the plan takes away; whether anything was freed."""
        self._valid_until = plan.valid_until
        if plan.split != self.state.line.target:
            self.state.line.target = plan.split
            self.state.log.resizes += 1
            self.state.log.reasons.append((self.now(), plan.split, plan.reason))
        for row, why in plan.refuse:
            self.state.end(row, FinishReason.REFUSED, why)
        for forward in plan.abandon:
            self.state.abandon(self.state.forwards[forward])
        for row in plan.preempt:
            self.state.preempt(row)
        return bool(plan.refuse or plan.abandon or plan.preempt)

    def _launch_all(self, plan: Plan) -> list[Side]:
        """Launch what the plan launches; the sides it was launched on."""
        launched = []
        if plan.step is not None and self._launcher.step(plan.step):
            launched.append(Side.DECODE)
        match plan.prefill:
            case StartPrefill() as start if self._launcher.start(start):
                launched.append(Side.PREFILL)
            case ResumePrefill(number, layers) if self._launcher.group(self.state.forwards[number], layers):
                launched.append(Side.PREFILL)
        return launched

    # ---- waiting

    def _wait_limit(self, until: float | None) -> float | None:
        limits = [moment for moment in (until, self.state.lands) if moment is not None]
        if self._valid_until is not None and self._valid_until > self.now():
            limits.append(self._valid_until)
        for track in self.state.tracks.values():
            if track.flights and len(track.flights) < self.state.lanes.depth:
                moment = track.flights[-1].expected - self._launcher.lead
                if self.now() < moment < math.inf:
                    limits.append(moment)
        return min(limits) if limits else None

    def _note_readiness(self) -> None:
        """Since when an idle lane that owns units has had work waiting (the bubble it may later show)."""
        for side, track in self.state.tracks.items():
            if track.flights:
                continue
            if self.state.line.target.units(side) == 0 or not self._has_work(side):
                track.ready_since = None
            elif track.ready_since is None:
                track.ready_since = self.now()

    def _has_work(self, side: Side) -> bool:
        states = self.state.table.state.tobytes()
        if side is Side.DECODE:
            return RUNNING in states
        return bool(self.state.forwards) or PREFILL in states or WAITING in states

    def _refuse_to_stall(self) -> None:
        if self.state.requests and not self.state.busy() and self._valid_until is None and not self.state.finished:
            raise SmpartError(
                f"policy {self.policy.name!r} plans nothing for {len(self.state.requests)} requests: a bug in it"
            )
