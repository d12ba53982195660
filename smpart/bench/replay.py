"""Replays timed requests on a core, in real or virtual time with the same code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from smpart.engine.log import RunLog
from smpart.engine.request import FinishReason, Request
from smpart.errors import SmpartError, UsageError
from smpart.runtime.sampling import SamplingParams
from smpart.scheduler.slo import SLO


class Core(Protocol):
    """What a replay needs of an `EngineCore`."""

    @property
    def log(self) -> RunLog:
        """What the run leaves behind."""

    @property
    def idle(self) -> bool:
        """Nothing waiting, running or in flight."""

    def now(self) -> float:
        """Seconds on the core's clock."""

    def add(self, request: Request) -> None:
        """Take a request in, or raise `UsageError` if it can never be served."""

    def cancel(self, request: Request) -> None:
        """End a request."""

    def turn(self, until: float | None = None) -> list[Request]:
        """Wait, plan, launch; the requests that ended."""


@dataclass(frozen=True, slots=True)
class Job:
    """A request to come: when (seconds from the start of the replay), and what."""

    due_s: float
    prompt: Sequence[int]
    params: SamplingParams
    hashes: Sequence[bytes] | None = None


@dataclass(frozen=True, slots=True)
class Served:
    """What became of one job. Times are seconds from the start of the replay.

    Attributes:
        due_s: when it was due; TTFT counts from here, whenever the loop took it in.
        times_s: when each output token was read.
        reason: ``stop``, ``length``, ``refused`` or ``error``.
    """

    index: int
    due_s: float
    prompt_tokens: int
    max_tokens: int
    times_s: tuple[float, ...]
    token_ids: tuple[int, ...]
    reason: FinishReason
    error: str | None = None
    cached_tokens: int = 0
    preemptions: int = 0

    @property
    def finished(self) -> bool:
        """Whether it got its whole answer."""
        return self.reason in (FinishReason.STOP, FinishReason.LENGTH)


@dataclass(frozen=True, slots=True)
class Replay:
    """One load served once: every request in order of arrival, and the core's log.

    Attributes:
        started: the core's clock at the first possible arrival; spans of `log` are on that clock.
        seconds: from there to the last request's end.
    """

    served: tuple[Served, ...]
    log: RunLog
    started: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Status:
    """How far a replay is; shown while it runs."""

    seconds: float
    arrived: int
    ended: int
    total: int


_STUCK_TURNS = 100_000


def replay(core: Core, jobs: Sequence[Job], slo: SLO, watch: Callable[[Status], None] | None = None) -> Replay:
    """Give `core` every job when it is due and wait for all of them.

    Args:
        core: fresh and idle.
        jobs: in order of `due_s`.
        slo: every request's objective.
        watch: called after each turn of the loop.

    Raises:
        SmpartError: the core stays busy without its clock moving on.
        KeyboardInterrupt: after everything in flight was cancelled and has ended.
    """
    started = core.now()
    requests = [
        Request(i, job.prompt, job.params, slo, hashes=job.hashes, arrival=started + job.due_s)
        for i, job in enumerate(jobs)
    ]
    try:
        _drive(core, requests, started, watch)
    except KeyboardInterrupt:
        _abort(core, requests)
        raise
    served = tuple(_served(request, job, started) for request, job in zip(requests, jobs, strict=True))
    ends = [s.times_s[-1] if s.times_s else s.due_s for s in served]
    return Replay(served, core.log, started, max(ends, default=0.0))


def _drive(core: Core, requests: list[Request], started: float, watch: Callable[[Status], None] | None) -> None:
    upcoming = ended = still = 0
    while upcoming < len(requests) or not core.idle:
        before = core.now()
        while upcoming < len(requests) and _due(requests[upcoming]) <= before:
            ended += not _add(core, requests[upcoming])
            upcoming += 1
        finished = core.turn(_due(requests[upcoming]) if upcoming < len(requests) else None)
        ended += len(finished)
        still = 0 if finished or core.now() > before else still + 1
        if still > _STUCK_TURNS:
            raise SmpartError(f"replay: {len(requests) - ended} requests are left and the clock does not move on")
        if watch is not None:
            watch(Status(core.now() - started, upcoming, ended, len(requests)))


def _due(request: Request) -> float:
    assert request.arrival is not None
    return request.arrival


def _add(core: Core, request: Request) -> bool:
    """Hand a request over. One that can never be served is refused here and costs the others nothing."""
    try:
        core.add(request)
    except UsageError as error:
        request.finish(FinishReason.REFUSED, str(error))
        return False
    return True


def _abort(core: Core, requests: list[Request]) -> None:
    for request in requests:
        core.cancel(request)
    while not core.idle:
        core.turn(None)


def _served(request: Request, job: Job, started: float) -> Served:
    assert request.finish_reason is not None
    return Served(
        request.id,
        job.due_s,
        len(job.prompt),
        job.params.max_tokens,
        tuple(t - started for t in request.times),
        tuple(request.token_ids),
        request.finish_reason,
        request.error,
        request.cached_tokens,
        request.preemptions,
    )
