"""A policy that does anything it may: random splits, chunks, layer groups, hybrid steps, preemptions, abandons."""

from __future__ import annotations

import random

import numpy as np

from smpart.partition import Shape, Split
from smpart.predictor.estimate import NOTHING, Estimate
from smpart.scheduler.plan import Piece, Plan, ResumePrefill, StartPrefill, Step
from smpart.scheduler.snapshot import Snapshot
from smpart.scheduler.table import State


class Constant:
    """A predictor that knows nothing."""

    def __init__(self, seconds: float = 0.001) -> None:
        self.seconds = seconds

    def predict(self, shape: Shape, units: int, neighbour: Shape = NOTHING) -> Estimate:
        return Estimate(self.seconds, 2 * self.seconds)

    def observe(self, shape: Shape, units: int, neighbour: Shape, fraction: float, seconds: float) -> None:
        pass


class Chaos:
    name = "chaos"

    def __init__(self, seed: int, preempt: float = 0.05, abandon: float = 0.05) -> None:
        self.random = random.Random(seed)
        self.preempt, self.abandon = preempt, abandon

    def plan(self, s: Snapshot) -> Plan:
        rng = self.random
        idle = not s.prefill_lane.inflight and not s.decode_lane.inflight
        whole_decode, whole_prefill = s.splits[0], s.splits[-1]
        running = [int(r) for r in s.running]
        prefer_prefill = bool(s.forwards or len(s.waiting) or len(s.prefilling))
        if running and prefer_prefill:
            split = rng.choice(s.splits)
        elif running:
            split = whole_decode
        else:
            split = rng.choice([whole_prefill, whole_prefill, whole_decode])
        if rng.random() < self.preempt:
            victims = [r for r in running if s.table.flying[r] == 0] or running
            if len(victims) > 1:
                return Plan(split, preempt=(rng.choice(victims),))
        if s.forwards and rng.random() < self.abandon:
            return Plan(split, abandon=(rng.choice(s.forwards).id,))
        if split.units is not None and split == whole_decode and not s.forwards:
            pieces = self._pieces(s, 3)
            rows = self._afford(s, [r for r in running if rng.random() < 0.9], pieces)
            if rows or pieces:
                return Plan(split, step=Step(tuple(rows), tuple(pieces)))
        prefill: StartPrefill | ResumePrefill | None = None
        if split.prefill:
            open_forwards = [f for f in s.forwards if f.layers_left]
            if open_forwards and (rng.random() < 0.7 or len(s.forwards) >= s.max_paused):
                prefill = ResumePrefill(rng.choice(open_forwards).id, rng.choice([1, 1, 2, None]))
            elif len(s.forwards) < s.max_paused and (pieces := self._pieces(s, 3)):
                prefill = StartPrefill(tuple(pieces), rng.choice([1, 2, None]))
        step = None
        if split.decode and running:
            rows = self._afford(s, [r for r in running if rng.random() < 0.9] or running[:1], [])
            step = Step(tuple(rows)) if rows else None
        plan = Plan(split, prefill=prefill, step=step)
        if idle and prefill is None and step is None:
            return self._something(s, running, whole_decode, whole_prefill)
        return plan

    def _something(self, s: Snapshot, running: list[int], whole_decode: Split, whole_prefill: Split) -> Plan:
        open_forwards = [f for f in s.forwards if f.layers_left]
        if open_forwards:
            return Plan(whole_prefill, prefill=ResumePrefill(open_forwards[0].id))
        rows = self._afford(s, running, [])
        if rows:
            return Plan(whole_decode, step=Step(tuple(rows)))
        if pieces := self._pieces(s, 1, eager=True):
            return Plan(whole_prefill, prefill=StartPrefill(tuple(pieces)))
        held = [int(r) for st in (State.RUNNING, State.PREFILL) for r in s.table.rows(st)]
        return Plan(whole_prefill, preempt=(max(held, key=lambda r: s.table.seq[r]),))

    def _pieces(self, s: Snapshot, most: int, eager: bool = False) -> list[Piece]:
        free, slots, pieces = s.free_blocks, s.free_slots, []
        candidates = [*map(int, s.prefilling), *map(int, s.waiting)]
        if not eager:
            self.random.shuffle(candidates)
        for row in candidates[:most]:
            waiting = s.table.state[row] == State.WAITING
            begin = int(s.table.cached[row] if waiting else s.table.computed[row])
            left = int(s.table.known[row]) - begin
            length = left if eager or self.random.random() < 0.3 else self.random.randint(1, left)
            need = -(-(begin + length) // s.block_tokens) - int(s.table.blocks[row])
            if need > free or (waiting and not slots):
                continue
            free -= need
            slots -= waiting
            pieces.append(Piece(row, length))
        return pieces

    def _afford(self, s: Snapshot, rows: list[int], pieces: list[Piece]) -> list[int]:
        if pieces:
            return [r for r in rows if s.table.computed[r] < s.table.blocks[r] * s.block_tokens]
        free, kept = s.free_blocks, []
        for row in rows:
            need = int(s.table.computed[row] >= s.table.blocks[row] * s.block_tokens)
            if need <= free:
                free -= need
                kept.append(row)
        return kept


def prompts(rng: np.random.Generator, count: int, longest: int, vocab: int = 500) -> list[list[int]]:
    """Random prompts, some of which share a prefix."""
    stem = rng.integers(3, vocab, longest).tolist()
    made = []
    for _ in range(count):
        fresh = rng.integers(3, vocab, int(rng.integers(1, longest))).tolist()
        shared = int(rng.integers(0, longest // 2)) if rng.random() < 0.5 else 0
        made.append((stem[:shared] + fresh)[:longest])
    return made
