"""Whether a replay can still reach the attainment it is made for: one that cannot need not go on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from smpart.bench.metrics import met
from smpart.bench.replay import Job, Served
from smpart.scheduler.slo import SLO


class Prospect:
    """Counts the requests that have missed an objective for good: those that ended so, and those without a first token
    whose TTFT objective has passed. All others may yet meet every one. Best-effort requests do not count.

    Args:
        jobs: in order of `due_s`.
        least: attainment below which the replay is of no use.
    """

    def __init__(self, jobs: Sequence[Job], slo: SLO, least: float) -> None:
        self._dues = [(index, job.due_s) for index, job in enumerate(jobs) if not job.best_effort]
        self._slo, self._least = slo, least
        self._missed: set[int] = set()
        self._passed = 0

    @property
    def reachable(self) -> float:
        """Attainment if everybody else meets every objective."""
        return (len(self._dues) - len(self._missed)) / len(self._dues)

    def lost(self, seconds: float, begun: Callable[[int], bool], ended: Iterable[Served]) -> bool:
        """Whether too many have missed, `seconds` after the start.

        Args:
            begun: whether a request has had a token.
            ended: since the last call.
        """
        self._missed.update(s.index for s in ended if not s.best_effort and not met(s, self._slo))
        while self._passed < len(self._dues) and (seconds - self._dues[self._passed][1]) * 1e3 > self._slo.ttft_ms:
            index = self._dues[self._passed][0]
            if not begun(index):
                self._missed.add(index)
            self._passed += 1
        return self.reachable < self._least
