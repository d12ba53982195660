"""vLLM's rule as later versions have it."""

from __future__ import annotations

from smpart.scheduler.policies.chunked import Chunked


class Reserving(Chunked):
    """A waiting request is let in only if all its tokens fit into free memory, not just its first chunk.

    vLLM's ``scheduler_reserve_full_isl``, on by default in 0.19 (`v1/core/sched/scheduler.py`).
    """

    def must_fit(self, end: int, known: int) -> int:
        """All of them."""
        return known
