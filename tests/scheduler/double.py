"""An engine made of numbers: it keeps the contract between policy and engine, and fails when a policy breaks it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from smpart.partition import Line, Shape, Side, Split
from smpart.partition.feasible import overlapping_splits
from smpart.partition.split import nested_or_overlapping
from smpart.predictor.estimate import NOTHING, Estimate, Sides, split_by_split
from smpart.scheduler.plan import AcrossDevices, Piece, Plan, Policy, ResumePrefill, StartPrefill, Step
from smpart.scheduler.slo import SLO
from smpart.scheduler.snapshot import ForwardView, LaneView, Snapshot
from smpart.scheduler.table import RequestTable, State

Cost = Callable[[Shape, int, Shape], float]


class Oracle:
    """A predictor that knows the cost, give or take."""

    def __init__(self, cost: Cost, bias: float = 1.0, margin: float = 1.05) -> None:
        self.cost, self.bias, self.margin = cost, bias, margin

    def predict(self, shape: Shape, units: int, neighbour: Shape = NOTHING) -> Estimate:
        mean = self.bias * self.cost(shape, units, neighbour)
        return Estimate(mean, mean * self.margin)

    def predict_splits(self, step: Shape, head: Shape, splits: Sequence[Split]) -> Sides:
        return split_by_split(self, step, head, splits)

    def observe(self, shape: Shape, units: int, neighbour: Shape, fraction: float, seconds: float) -> None:
        pass


def cpu_cost(shape: Shape, units: int, beside: Shape) -> float:
    """Two slow cores: decode is bound by memory, prefill by arithmetic (seconds)."""
    one, both = (0.1153, 0.01471, 1 / 240), (0.1156, 0.00643, 1 / 360)
    base, row, token = one if units == 1 else both
    seconds = 0.02 + row * shape.decode_batch + token * shape.prefill_tokens + 1e-7 * shape.prefill_pairs / units
    seconds += base - 0.02 if shape.decode_batch else min(base - 0.02, 0.3 * token * shape.prefill_tokens)
    return seconds * (1.08 if beside.tokens else 1.0)


def gpu_cost(shape: Shape, units: int, beside: Shape) -> float:
    """132 units, an 8B model: the form of published curves (seconds)."""
    share = units / 132
    flops = 6e14 * share * 1.3 / (1 + 0.3 * share)
    band = 2.7e12 * (1 - np.exp(-share / 0.18)) / (1 - np.exp(-1 / 0.18))
    linear = max(1.5e10 * (shape.prefill_tokens + shape.decode_batch) / flops, 1.5e10 / band)
    attention = 5.2e5 * shape.prefill_pairs / flops
    kv = 131072 * (shape.prefill_context + shape.prefill_tokens + shape.decode_context) / band
    return (3e-4 + linear + attention + kv) * (1.12 if beside.tokens else 1.0)


@dataclass(frozen=True)
class Ask:
    arrival: float
    prompt: int
    outputs: int
    max_tokens: int = 0
    slo: SLO = SLO()  # noqa: RUF009
    best_effort: bool = False


@dataclass
class Told:
    """What became of a request."""

    ask: Ask
    times: list[float] = field(default_factory=list)
    preemptions: int = 0
    refused: bool = False

    @property
    def good(self) -> bool:
        if self.refused or not self.times:
            return False
        slo, n = self.ask.slo, len(self.times)
        tpot = (self.times[-1] - self.times[0]) / max(1, n - 1)
        return self.times[0] - self.ask.arrival <= slo.ttft_ms / 1e3 and tpot <= slo.tpot_ms / 1e3


@dataclass(eq=False)
class Job:
    side: Side
    split: Split
    shape: Shape
    fraction: float
    rows: tuple[int, ...]
    parts: tuple[tuple[int, int, bool], ...]
    forward: int | None
    last: bool
    ends: float = 0.0


class Double:
    """Runs asks under a policy; `told` says how it went.

    Args:
        shares: whether the lanes can share units.
        token_seconds: what one token's KV takes to cross, under a policy with two devices.
    """

    def __init__(
        self,
        policy: Policy,
        asks: Sequence[Ask],
        *,
        cost: Cost = cpu_cost,
        predictor: object = None,
        units: int = 2,
        step: int = 1,
        blocks: int = 4096,
        slots: int = 256,
        layers: int = 30,
        max_paused: int = 4,
        lead: float = 0.0,
        noise: float = 0.0,
        check: bool = True,
        shares: bool = False,
        token_seconds: float = 1e-4,
    ) -> None:
        self.policy, self.cost = policy, cost
        self.predictor = predictor or Oracle(cost)
        self.splits = tuple(Split(p, units - p) for p in [0, *range(step, units - step + 1, step), units])
        self.across, self.token_seconds = isinstance(policy, AcrossDevices), token_seconds
        if self.across:
            self.splits = (Split(units, units),)
        self.overlapping = overlapping_splits(self.splits) if shares and not self.across else ()
        self.line = Line(self.splits[0], nested_or_overlapping(self.splits[0].total))
        self.there, self.over_there = blocks, set()
        self.crossing: list[tuple[float, int]] = []
        self.table = RequestTable(8)
        self.size, self.layers, self.max_paused, self.lead = 16, layers, max_paused, lead
        self.pool, self.free, self.slots = blocks, blocks, slots
        self.now, self.numbers, self.check = 0.0, itertools.count(1), check
        self.asks = sorted(asks, key=lambda a: a.arrival)
        self.told: dict[int, Told] = {}
        self.seq_told: list[Told] = []
        self.lanes: dict[Side, list[Job]] = {side: [] for side in Side}
        self.forwards: dict[int, dict] = {}
        self.noise = np.random.default_rng(0)
        self.sigma = noise
        self.valid_until: float | None = None
        self.events: list[tuple[float, int]] = []
        self.log: list[tuple[float, str, str]] = []
        self.stalls: dict[int, float] = {}
        self.paused_since: dict[int, float] = {}
        self.longest_pause = 0.0
        self.moves = 0

    # ---- running

    def run(self, limit: int = 200_000) -> list[Told]:
        arrivals = list(self.asks)[::-1]
        for _ in range(limit):
            while arrivals and arrivals[-1].arrival <= self.now:
                self._arrive(arrivals.pop())
            self._decide()
            moments = [lane[0].ends for lane in self.lanes.values() if lane]
            moments += [moment for moment, _ in self.crossing[:1]]
            leads = [lane[0].ends - self.lead for lane in self.lanes.values() if len(lane) == 1]
            moments += [moment for moment in leads if moment > self.now]
            if arrivals:
                moments.append(arrivals[-1].arrival)
            if self.valid_until is not None and self.valid_until > self.now:
                moments.append(self.valid_until)
            if not moments:
                assert len(self.table) == 0, f"stalled: {self._dump()}"
                assert self.free == self.there == self.pool and not self.over_there
                return self.seq_told
            self.now = max(self.now, min(moments))
            for side in Side:
                while self.lanes[side] and self.lanes[side][0].ends <= self.now + 1e-12:
                    self._done(side)
            while self.crossing and self.crossing[0][0] <= self.now:
                self._land(self.crossing.pop(0)[1])
        raise AssertionError(f"not done after {limit} turns: {self._dump()}")

    def _dump(self) -> str:
        t = self.table
        rows = np.flatnonzero(t.state != State.FREE)
        return str([(State(t.state[r]).name, int(t.known[r]), int(t.computed[r]), int(t.blocks[r])) for r in rows])

    def _arrive(self, ask: Ask) -> None:
        t, row = self.table, self.table.take()
        limit = ask.max_tokens or ask.outputs
        assert -(-(ask.prompt + limit) // self.size) <= self.pool
        t.seq[row], t.arrival[row] = next(self.numbers), ask.arrival
        t.ttft_deadline[row] = ask.arrival + ask.slo.ttft_ms / 1e3
        t.tpot[row], t.itl[row] = ask.slo.tpot_ms / 1e3, ask.slo.itl_ms / 1e3
        t.prompt[row] = t.known[row] = ask.prompt
        t.max_tokens[row], t.best_effort[row], t.state[row] = limit, ask.best_effort, State.WAITING
        told = Told(ask)
        self.told[row] = told
        self.seq_told.append(told)

    def snapshot(self) -> Snapshot:
        t = self.table
        running = t.rows(State.RUNNING)
        running = running[t.outputs[running] + t.ahead[running] < t.max_tokens[running]]
        prefilling = t.rows(State.PREFILL)
        views = tuple(
            ForwardView(i, f["rows"], f["lengths"], f["shape"], f["left"], f["inflight"], f["started"])
            for i, f in self.forwards.items()
        )
        return Snapshot(
            now=self.now, table=t, waiting=t.rows(State.WAITING), prefilling=prefilling[t.forward[prefilling] < 0],
            running=running, forwards=views, prefill_lane=self._view(Side.PREFILL),
            decode_lane=self._view(Side.DECODE), split=self.line.target, splits=self.splits, free_blocks=self.free,
            block_tokens=self.size, free_slots=self.slots, layers=self.layers, max_paused=self.max_paused,
            predictor=self.predictor, overlapping=self.overlapping,
            decode_blocks=self.there if self.across else None,
        )  # fmt: skip

    def _view(self, side: Side) -> LaneView:
        lane = self.lanes[side]
        if not lane:
            return LaneView(1, 0, self.now, NOTHING)
        return LaneView(self._room(side), len(lane), max(self.now, lane[-1].ends), lane[-1].shape)

    def _room(self, side: Side) -> int:
        lane = self.lanes[side]
        return 1 if not lane or (len(lane) == 1 and lane[0].ends - self.lead <= self.now) else 0

    # ---- deciding

    def _decide(self) -> None:
        for _ in range(8):
            if not len(self.table):
                return
            snapshot = self.snapshot()
            plan = self.policy.plan(snapshot)
            if self.check:
                self._legal(snapshot, plan)
                plan = self.policy.plan(snapshot)  # the first was dropped, as when the line does not grant
                self._legal(snapshot, plan)
            if not self._apply(plan):
                return
        raise AssertionError("the policy launches without end")

    def _legal(self, s: Snapshot, plan: Plan) -> None:
        t = self.table
        assert plan.split in s.splits or plan.split in s.overlapping
        assert plan.split.prefill + plan.split.decode <= s.units or plan.split in s.overlapping
        for row in plan.preempt:
            assert row in s.running or row in s.prefilling
        for row, _ in plan.refuse:
            assert row in s.waiting
        given = {r: int(t.blocks[r]) for r in plan.preempt if not t.flying[r]}
        free = s.free_blocks + sum(blocks for r, blocks in given.items() if r not in self.over_there)
        there = self.there + sum(blocks for r, blocks in given.items() if r in self.over_there)
        slots = s.free_slots
        seen: set[int] = set(plan.preempt)
        pieces: list[Piece] = []
        if plan.step is not None:
            assert s.decode_lane.room and plan.split.decode
            assert plan.step.rows or plan.step.pieces
            assert set(plan.step.rows) <= set(s.running.tolist())
            assert not (plan.step.pieces and (s.forwards or plan.split.prefill))
            for row in plan.step.rows:
                assert row not in seen
                seen.add(row)
                more = max(0, -(-(int(t.computed[row]) + 1) // self.size) - int(t.blocks[row]))
                free, there = (free, there - more) if row in self.over_there else (free - more, there)
            pieces += plan.step.pieces
        if isinstance(plan.prefill, StartPrefill):
            assert s.prefill_lane.room and plan.split.prefill and len(s.forwards) < s.max_paused
            assert plan.prefill.pieces
            pieces += plan.prefill.pieces
        elif isinstance(plan.prefill, ResumePrefill):
            assert s.prefill_lane.room and plan.split.prefill
            assert {f.id: f.layers_left for f in s.forwards}[plan.prefill.forward] > 0
        if plan.prefill is not None and plan.prefill.layers is not None:
            assert plan.prefill.layers >= 1
        refused = {row for row, _ in plan.refuse}
        for piece in pieces:
            assert piece.row not in seen and piece.row not in refused
            assert piece.row in s.waiting or piece.row in s.prefilling
            seen.add(piece.row)
            start = int(t.computed[piece.row])
            assert 1 <= piece.length <= int(t.known[piece.row]) - start
            slots -= piece.row in s.waiting
            free -= max(0, -(-(start + piece.length) // self.size) - int(t.blocks[piece.row]))
        for row in plan.pull:
            assert self.across and t.state[row] == State.CROSSING and not t.flying[row] and row not in seen
            there -= -(-int(t.computed[row]) // self.size)
        assert min(free, there) >= 0, "more blocks planned than there are"
        assert slots >= 0, "more rows admitted than there are slots"

    def _apply(self, plan: Plan) -> bool:
        self.valid_until = plan.valid_until
        if plan.split != self.line.target:
            self.moves += 1
            self.line.target = plan.split
        self.log.append((self.now, str(plan.split), plan.reason))
        for row, _ in plan.refuse:
            self.told[row].refused = True
            self._forget(row)
        for row in plan.preempt:
            self.told[row].preemptions += 1
            self.table.preemptions[row] += 1
            self.table.state[row] = State.LEAVING
            self._settle(row)
        assert not plan.abandon
        changed = bool(plan.preempt or plan.refuse or plan.pull)
        for row in plan.pull:
            self._pull(row)
        if plan.step is not None:
            changed |= self._step(plan.step)
        if isinstance(plan.prefill, StartPrefill):
            changed |= self._start(plan.prefill)
        elif isinstance(plan.prefill, ResumePrefill):
            changed |= self._group(plan.prefill.forward, plan.prefill.layers)
        return changed

    # ---- launching

    def _grow(self, row: int, tokens: int) -> None:
        more = max(0, -(-tokens // self.size) - int(self.table.blocks[row]))
        if row in self.over_there:
            assert more <= self.there
            self.there -= more
        else:
            assert more <= self.free
            self.free -= more
        self.table.blocks[row] += more

    def _place(self, piece: Piece) -> tuple[int, int, bool]:
        t, row = self.table, piece.row
        if t.state[row] == State.WAITING:
            self.slots -= 1
            t.slot[row], t.state[row] = 1, State.PREFILL
        start = int(t.computed[row])
        self._grow(row, start + piece.length)
        t.computed[row] = start + piece.length
        t.flying[row] += 1
        return row, start, bool(t.computed[row] == t.known[row])

    def _launch(self, job: Job) -> None:
        lane = self.lanes[job.side]
        begins = lane[-1].ends if lane else self.now
        other = self.lanes[job.side.other]
        beside = other[0].shape if other else NOTHING
        seconds = self.cost(job.shape, job.split.units(job.side), beside) * job.fraction
        job.ends = begins + seconds * float(np.exp(self.noise.normal(0.0, self.sigma)))
        self.predictor.observe(job.shape, job.split.units(job.side), beside, job.fraction, job.ends - begins)
        lane.append(job)
        self.line.launched(id(job), job.side, job.split)

    def _step(self, step: Step) -> bool:
        split = self.line.grant(Side.DECODE)
        if split is None or (step.pieces and not split.exclusive):
            return False
        t = self.table
        context = sum(int(t.computed[r]) + 1 for r in step.rows)
        for row in step.rows:
            self._grow(row, int(t.computed[row]) + 1)
        parts = tuple(self._place(p) for p in step.pieces)
        shape = Shape.decode(len(step.rows), context)
        shape = shape.join(Shape.prefill((p.length, part[1]) for p, part in zip(step.pieces, parts, strict=True)))
        self._launch(Job(Side.DECODE, split, shape, 1.0, step.rows, parts, None, True))
        for row in step.rows:
            t.computed[row] += 1
            t.ahead[row] += 1
            t.flying[row] += 1
        for row, _, final in parts:
            if final:
                t.state[row], t.ahead[row] = State.RUNNING, 1
        return True

    def _start(self, start: StartPrefill) -> bool:
        if self.line.grant(Side.PREFILL) is None:
            return False
        parts = tuple(self._place(p) for p in start.pieces)
        number = next(self.numbers)
        lengths = tuple(p.length for p in start.pieces)
        shape = Shape.prefill((p.length, part[1]) for p, part in zip(start.pieces, parts, strict=True))
        rows = tuple(p.row for p in start.pieces)
        self.forwards[number] = {
            "rows": rows, "lengths": lengths, "shape": shape, "left": self.layers, "inflight": 0,
            "started": self.now, "parts": parts,
        }  # fmt: skip
        self.table.forward[list(rows)] = number
        return self._group(number, start.layers)

    def _group(self, number: int, layers: int | None) -> bool:
        split = self.line.grant(Side.PREFILL)
        if split is None:
            return False
        forward = self.forwards[number]
        count = forward["left"] if layers is None else min(layers, forward["left"])
        forward["left"] -= count
        forward["inflight"] += 1
        if number in self.paused_since:
            self.longest_pause = max(self.longest_pause, self.now - self.paused_since.pop(number))
        last = forward["left"] == 0
        self._launch(
            Job(Side.PREFILL, split, forward["shape"], count / self.layers, (), forward["parts"], number, last)
        )
        return True

    def _pull(self, row: int) -> None:
        tokens = int(self.table.computed[row])
        self.there -= -(-tokens // self.size)
        assert self.there >= 0
        self.table.flying[row] += 1
        begins = self.crossing[-1][0] if self.crossing else self.now
        self.crossing.append((begins + tokens * self.token_seconds, row))

    # ---- endings

    def _land(self, row: int) -> None:
        t = self.table
        t.flying[row] -= 1
        self.free += int(t.blocks[row])
        self.over_there.add(row)
        t.blocks[row] = -(-int(t.computed[row]) // self.size)
        if t.state[row] == State.CROSSING:
            t.state[row] = State.RUNNING
        self._settle(row)

    def _done(self, side: Side) -> None:
        job = self.lanes[side].pop(0)
        self.line.completed(id(job))
        t = self.table
        if job.forward is not None:
            self.forwards[job.forward]["inflight"] -= 1
            if not job.last:
                if not self.forwards[job.forward]["inflight"]:
                    self.paused_since[job.forward] = self.now
                return
            del self.forwards[job.forward]
        for row in job.rows:
            t.flying[row] -= 1
            t.ahead[row] -= 1
            self._read(row)
        for row, _, final in job.parts:
            t.flying[row] -= 1
            t.forward[row] = -1
            if final:
                t.ahead[row] = 0
                if t.state[row] == State.PREFILL:
                    t.state[row] = State.CROSSING if self.across else State.RUNNING
                self._read(row)
            else:
                self._settle(row)

    def _read(self, row: int) -> None:
        told = self.told.get(row)
        t = self.table
        if told is None or len(told.times) == told.ask.outputs:
            self._settle(row)
            return
        if not t.outputs[row]:
            t.first_token[row] = self.now
        t.last_token[row] = self.now
        t.outputs[row] += 1
        t.known[row] += 1
        told.times.append(self.now)
        if len(told.times) == told.ask.outputs:
            t.state[row] = State.LEAVING
        self._settle(row)

    def _settle(self, row: int) -> None:
        t = self.table
        if t.state[row] != State.LEAVING or t.flying[row]:
            return
        if row in self.over_there:
            self.over_there.remove(row)
            self.there += int(t.blocks[row])
        else:
            self.free += int(t.blocks[row])
        self.slots += 1
        t.blocks[row] = t.computed[row] = t.ahead[row] = 0
        t.slot[row] = t.forward[row] = -1
        if len(self.told[row].times) == self.told[row].ask.outputs:
            self._forget(row)
        else:
            t.state[row] = State.WAITING

    def _forget(self, row: int) -> None:
        del self.told[row]
        self.table.give_back(row)


def bursty(seed: int, rate: float, seconds: float, slo: SLO, long: tuple[int, int], short: tuple[int, int],
           outputs: tuple[int, int], share: float = 0.15) -> list[Ask]:  # fmt: skip
    """Bursts of short prompts with long ones in between."""
    rng = np.random.default_rng(seed)
    asks, now = [], 0.0
    while now < seconds:
        now += rng.exponential(3 / rate)
        for _ in range(int(rng.poisson(3))):
            size = long if rng.random() < share else short
            asks.append(Ask(now + rng.random() * 0.05, int(rng.integers(*size)), int(rng.integers(*outputs)), slo=slo))
    return asks


def goodput(told: Sequence[Told]) -> float:
    return sum(t.good for t in told) / max(1, len(told))


def worst_gap(told: Sequence[Told], quantile: float = 99.0) -> float:
    gaps = [b - a for t in told for a, b in itertools.pairwise(t.times)]
    return float(np.percentile(gaps, quantile)) if gaps else 0.0


__all__ = ["Ask", "Double", "Oracle", "Told", "bursty", "cpu_cost", "goodput", "gpu_cost", "worst_gap"]
