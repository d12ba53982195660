"""Chunked prefill: one hybrid step after another under a token budget (vLLM V1's scheduler; Sarathi-Serve).

Source: vLLM `v1/core/sched/scheduler.py`; Sarathi-Serve (arXiv 2403.02310) sections 4.2 and 4.3. Simplified:
arrival order stands for admission order, and speculation is left out.
"""

from __future__ import annotations

import numpy as np

from smpart.partition import Split
from smpart.scheduler import memory
from smpart.scheduler.memory import Fit
from smpart.scheduler.plan import Piece, Plan, Step, only_decodes
from smpart.scheduler.registry import Setup, register
from smpart.scheduler.snapshot import Rows, Snapshot
from smpart.scheduler.table import State

DEFAULT_BUDGET = 2048


@register("chunked")
class Chunked:
    """``chunked[:budget]``: at most `budget` tokens a step; admitted requests first, then new ones."""

    def __init__(self, setup: Setup) -> None:
        self.budget = setup.whole("chunked", DEFAULT_BUDGET)
        self.name = f"chunked:{self.budget}" if setup.argument else "chunked"

    def plan(self, snapshot: Snapshot) -> Plan:
        """One step of everything that fits under the budget."""
        whole = Split(0, snapshot.units)
        if snapshot.decode_lane.room == 0:
            return Plan(whole, reason="the lane is full")
        rows, tokens = self._walk(snapshot)
        table = snapshot.table
        fit = memory.fit(snapshot, rows, memory.blocks_wanted(snapshot, rows, table.computed[rows] + tokens))
        kept = np.isin(rows, fit.rows) if fit.short else np.ones(len(rows), dtype=np.bool_)
        partial = kept & (table.state[rows] == State.PREFILL)
        pieces = [Piece(r, n) for r, n in zip(rows[partial].tolist(), tokens[partial].tolist(), strict=True)]
        decodes = tuple(rows[kept & ~partial].tolist())
        if not fit.short:
            pieces += self._admit(snapshot, fit, self.budget - int(tokens.sum()))
        step = Step(decodes, tuple(pieces)) if decodes or pieces else None
        used = len(decodes) + sum(piece.length for piece in pieces)
        reason = f"{len(decodes)} decodes, {len(pieces)} chunks, {used} of {self.budget} tokens"
        steady = only_decodes(snapshot, len(decodes))
        return Plan(whole, step=step, preempt=fit.preempt, steady=steady, reason=reason)

    def _walk(self, snapshot: Snapshot) -> tuple[Rows, memory.Counts]:
        """Admitted rows in order of arrival and the tokens each gets of the budget; rows that get none are left out."""
        table = snapshot.table
        rows = np.concatenate((snapshot.running, snapshot.prefilling))
        tokens = np.ones(len(rows), dtype=np.int64)
        if snapshot.prefilling.size:
            tokens[len(snapshot.running) :] = table.known[snapshot.prefilling] - table.computed[snapshot.prefilling]
            order = np.argsort(table.seq[rows], kind="stable")
            rows, tokens = rows[order], tokens[order]
        spent = np.cumsum(tokens) - tokens
        tokens = np.minimum(tokens, self.budget - spent)
        some = tokens > 0
        return rows[some], tokens[some]

    def _admit(self, snapshot: Snapshot, fit: Fit, left: int) -> list[Piece]:
        pieces: list[Piece] = []
        free = fit.free
        heads = snapshot.waiting[: min(left, snapshot.free_slots)]
        starts = memory.first_token(snapshot, heads).tolist()
        for row, start, known in zip(heads.tolist(), starts, snapshot.table.known[heads].tolist(), strict=True):
            length = min(known - start, left)
            blocks = -(-(start + length) // snapshot.block_tokens)
            if length == 0 or -(-self.must_fit(start + length, known) // snapshot.block_tokens) > free:
                break
            pieces.append(Piece(row, length))
            left, free = left - length, free - blocks
        return pieces

    def must_fit(self, end: int, known: int) -> int:
        """Tokens for which there must be memory to let a request in, whose first chunk ends at `end` of `known`."""
        return end
