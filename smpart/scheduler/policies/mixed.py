"""Prefill first: a batch of whole prompts runs alone on the whole device, else everybody decodes (SGLang's default).

Source: SGLang `scheduler.py`, `schedule_policy.py`, `schedule_batch.py`. Simplified: first come, first served;
overlap scheduling is left out; a request whose answer could outgrow the pool is admitted when it is alone.
"""

from __future__ import annotations

import numpy as np

from smpart.partition import Split
from smpart.scheduler import memory
from smpart.scheduler.memory import Fit
from smpart.scheduler.plan import Piece, Plan, StartPrefill, Step
from smpart.scheduler.registry import Setup, register
from smpart.scheduler.snapshot import Rows, Snapshot
from smpart.scheduler.table import State

DEFAULT_CHUNK = 8192
BATCH_TOKENS = 16384
CLIP = 4096
"""Longest answer the estimate believes in."""
FIRST_RATIO, LAST_RATIO, RATIO_STEPS = 0.7, 0.098, 600
RETRACT_TOKENS = 20


@register("mixed")
class Mixed:
    """``mixed[:chunk]``: prompts longer than `chunk` tokens are cut.

    Attributes:
        ratio: share of each running request's remaining answer that admission sets memory aside for.
    """

    def __init__(self, setup: Setup) -> None:
        self.chunk = setup.whole("mixed", DEFAULT_CHUNK)
        self.name = f"mixed:{self.chunk}" if setup.argument else "mixed"
        self.ratio = FIRST_RATIO
        self._stepped: tuple[int, int, int] | None = None

    def plan(self, snapshot: Snapshot) -> Plan:
        """The next prefill batch if one can be formed, else a decode step."""
        self._count_steps(snapshot)
        pieces = self._batch(snapshot)
        if pieces:
            tokens = sum(piece.length for piece in pieces)
            may = snapshot.prefill_lane.room and len(snapshot.forwards) < snapshot.max_paused
            start = StartPrefill(tuple(pieces)) if may else None
            return Plan(Split(snapshot.units, 0), start, reason=f"prefill {len(pieces)} prompts, {tokens} tokens")
        if not snapshot.running.size and (snapshot.forwards or snapshot.prefilling.size):
            head = int(snapshot.prefilling[0]) if snapshot.prefilling.size else -1
            return Plan(Split(snapshot.units, 0), preempt=memory.unblock(snapshot, head), reason="prefill goes on")
        return self._decode(snapshot)

    def _count_steps(self, snapshot: Snapshot) -> None:
        """Lower the ratio once for each step that was launched since it was planned."""
        if self._stepped is not None:
            row, seq, computed = self._stepped
            if snapshot.table.seq[row] != seq or snapshot.table.computed[row] > computed:
                self.ratio = max(LAST_RATIO, self.ratio - (FIRST_RATIO - LAST_RATIO) / RATIO_STEPS)
                self._stepped = None

    def _batch(self, snapshot: Snapshot) -> list[Piece]:
        table, size = snapshot.table, snapshot.block_tokens
        free = snapshot.free_blocks
        left = min(self.chunk, BATCH_TOKENS)
        pieces: list[Piece] = []
        for row in snapshot.prefilling.tolist():
            start, known = int(table.computed[row]), int(table.known[row])
            length = min(known - start, left, (free + int(table.blocks[row])) * size - start)
            if length <= 0:
                return pieces
            free -= max(0, -(-(start + length) // size) - int(table.blocks[row]))
            left -= length
            pieces.append(Piece(row, length))
        return pieces + self._admit(snapshot, free, left, bool(pieces))

    def _admit(self, snapshot: Snapshot, free: int, left: int, busy: bool) -> list[Piece]:
        """First come, first served, while the memory estimate holds."""
        table, size, running = snapshot.table, snapshot.block_tokens, snapshot.running
        answers = np.minimum(table.max_tokens[running] - table.outputs[running] - table.ahead[running], CLIP)
        room = free * size - float(answers.sum()) * self.ratio
        busy = busy or bool(running.size or snapshot.forwards)
        heads = snapshot.waiting[: min(snapshot.free_slots, left)]
        starts = memory.first_token(snapshot, heads).tolist()
        pieces: list[Piece] = []
        for row, start in zip(heads.tolist(), starts, strict=True):
            extend = int(table.known[row]) - start
            answer = min(int(table.max_tokens[row] - table.outputs[row]), CLIP)
            blocks = -(-(start + extend) // size)
            alone = not busy and not pieces
            if left == 0 or blocks > free or not (extend + answer < room or alone):
                break
            length = min(extend, left)
            pieces.append(Piece(row, length))
            room -= extend + answer
            left, free = left - length, free - blocks
            if length < extend:
                break
        return pieces

    def _decode(self, snapshot: Snapshot) -> Plan:
        whole = Split(0, snapshot.units)
        if not snapshot.running.size or snapshot.decode_lane.room == 0:
            return Plan(whole, reason="nothing to launch")
        fit = self._fit(snapshot)
        if not fit.rows.size:
            return Plan(whole, preempt=fit.preempt, reason="waits for memory")
        head = int(fit.rows[0])
        self._stepped = (head, int(snapshot.table.seq[head]), int(snapshot.table.computed[head]))
        return Plan(
            whole, step=Step(tuple(fit.rows.tolist())), preempt=fit.preempt, reason=f"decode {fit.rows.size} rows"
        )

    def _fit(self, snapshot: Snapshot) -> Fit:
        """The rows that can take a token; retracts whoever has said least until every survivor has 20 tokens."""
        table, rows = snapshot.table, snapshot.running
        need = table.computed[rows] // snapshot.block_tokens >= table.blocks[rows]
        total = int(np.count_nonzero(need))
        if total <= snapshot.free_blocks:
            return Fit(rows, (), snapshot.free_blocks - total, False)
        free, coming = snapshot.free_blocks, int(table.blocks[table.state == State.LEAVING].sum())
        out: list[int] = []
        line = rows[np.lexsort((-table.prompt[rows], table.outputs[rows]))].tolist()
        while len(line) > 1 and not self._enough(snapshot, line, free + coming):
            victim = line.pop(0)
            out.append(victim)
            if table.flying[victim]:
                coming += int(table.blocks[victim])
            else:
                free += int(table.blocks[victim])
        if len(line) == 1 and not out and free + coming == 0 and not snapshot.forwards:
            out = list(memory.squeeze(snapshot, rows, need.astype(np.int64), snapshot.prefilling).preempt)
        if out:
            self._after_retraction(snapshot, np.asarray(line, dtype=np.intp))
        stay = ~np.isin(rows, np.asarray(out, dtype=np.intp))
        rows, need = rows[stay], need[stay]
        fits = np.cumsum(need) * need <= free
        return Fit(rows[fits], tuple(out), free, True)

    def _enough(self, snapshot: Snapshot, line: list[int], free: int) -> bool:
        return free * snapshot.block_tokens >= RETRACT_TOKENS * len(line)

    def _after_retraction(self, snapshot: Snapshot, stay: Rows) -> None:
        table = snapshot.table
        limits = float(table.max_tokens[stay].sum())
        said = float(table.outputs[stay].sum()) + RETRACT_TOKENS * len(stay)
        self.ratio = min(1.0, said / limits) if limits else self.ratio
