"""A core that serves one request at a time on a clock of its own: easy to work out by hand."""

from __future__ import annotations

from collections import deque
from pathlib import Path

import gpu_samples
import pytest

from smpart.bench.fit import Fitted, fit_folder
from smpart.engine.log import RunLog, Span
from smpart.engine.request import FinishReason, Request
from smpart.errors import UsageError
from smpart.partition import Side, Split


class FakeCore:
    """First come, first served: `first_s` to a first token, `gap_s` to each further one."""

    def __init__(self, first_s: float, gap_s: float, max_len: int = 1000, start: float = 100.0) -> None:
        self.log = RunLog()
        self.added: list[tuple[float, int]] = []
        self.interrupt_at: float | None = None
        self._clock = start
        self._first_s, self._gap_s = first_s, gap_s
        self._max_len = max_len
        self._queue: deque[Request] = deque()
        self._cancelled: list[Request] = []
        self._begun: float | None = None

    @property
    def idle(self) -> bool:
        return not self._queue and not self._cancelled

    def now(self) -> float:
        return self._clock

    def add(self, request: Request) -> None:
        if len(request.prompt) + request.params.max_tokens > self._max_len:
            raise UsageError("too long")
        self.added.append((self._clock, request.id))
        self._queue.append(request)

    def cancel(self, request: Request) -> None:
        if request in self._queue:
            self._queue.remove(request)
            request.finish(FinishReason.CANCELLED)
            self._cancelled.append(request)

    def turn(self, until: float | None = None) -> list[Request]:
        gone, self._cancelled = self._cancelled, []
        if gone:
            return gone
        if not self._queue:
            assert until is not None, "an idle core was asked to wait for ever"
            self._clock = max(self._clock, until)
            return []
        return self._work(self._queue[0], until)

    def _work(self, request: Request, until: float | None) -> list[Request]:
        begun = self._clock if self._begun is None else self._begun
        ready = begun + (self._gap_s if request.times else self._first_s)
        if self.interrupt_at is not None and ready > self.interrupt_at:
            self.interrupt_at = None
            raise KeyboardInterrupt
        if until is not None and until < ready:
            self._begun, self._clock = begun, until
            return []
        self._begun, self._clock = None, ready
        side = Side.DECODE if request.times else Side.PREFILL
        self.log.ran(Span(side, begun, ready, side.value, 1, 1, Split(1, 1)), 0.0)
        request.accept(7, ready, None, frozenset())
        return [self._queue.popleft()] if request.finished else []


@pytest.fixture
def fake_core() -> type[FakeCore]:
    return FakeCore


@pytest.fixture(scope="session")
def fitted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Fitted]:
    """A profile folder of a simulated GPU, fitted once for all who look at it; ``cache`` beside it is its cache."""
    root = tmp_path_factory.mktemp("profiled")
    folder = gpu_samples.write(root / "profile", gpu_samples.samples(8))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SMPART_CACHE", str(root / "cache"))
        patch.setattr("smpart.bench.heldout.FOLDS", 2)
        return folder, fit_folder(folder)
