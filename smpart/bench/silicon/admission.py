"""vLLM's rule as later versions have it."""

from __future__ import annotations

from smpart.scheduler import memory
from smpart.scheduler.memory import Fit
from smpart.scheduler.plan import Piece
from smpart.scheduler.policies.chunked import Chunked
from smpart.scheduler.snapshot import Snapshot


class Reserving(Chunked):
    """A waiting request is let in only if all its tokens fit into free memory, not just its first chunk.

    vLLM's ``scheduler_reserve_full_isl``, on by default in 0.19 (`v1/core/sched/scheduler.py`).
    """

    def _admit(self, snapshot: Snapshot, fit: Fit, left: int) -> list[Piece]:
        pieces: list[Piece] = []
        free = fit.free
        heads = snapshot.waiting[: min(left, snapshot.free_slots)]
        starts = memory.first_token(snapshot, heads).tolist()
        for row, start, known in zip(heads.tolist(), starts, snapshot.table.known[heads].tolist(), strict=True):
            length = min(known - start, left)
            if length == 0 or -(-known // snapshot.block_tokens) > free:
                break
            pieces.append(Piece(row, length))
            left, free = left - length, free - -(-(start + length) // snapshot.block_tokens)
        return pieces
