"""Replays timed requests on a core, in real or virtual time with the same code."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

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


class Judge(Protocol):
    """Tells whether a replay is still of use."""

    @property
    def reachable(self) -> float:
        """Attainment that is still possible."""

    def lost(self, seconds: float, begun: Callable[[int], bool], ended: Iterable[Served]) -> bool:
        """Whether to cut it short; asked after each turn with the time, who has had a token, and who has ended."""


@dataclass(frozen=True, slots=True)
class Job:
    """A request to come: when (seconds from the start of the replay), and what."""

    due_s: float
    prompt: Sequence[int]
    params: SamplingParams
    hashes: Sequence[bytes] | None = None
    best_effort: bool = False


@dataclass(frozen=True, slots=True)
class Served:
    """What became of one job. Times are seconds from the start of the replay.

    Attributes:
        due_s: when it was due; TTFT counts from here, whenever the loop took it in.
        times_s: when each output token was read.
        reason: ``stop``, ``length``, ``refused`` or ``error``; ``cancelled`` if the replay was cut short before.
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
    best_effort: bool = False

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
        reachable: the attainment that was still possible when it was cut short; None: it was not.
    """

    served: tuple[Served, ...]
    log: RunLog
    started: float
    seconds: float
    reachable: float | None = None


class Status(NamedTuple):
    """How far a replay is; shown while it runs."""

    seconds: float
    arrived: int
    ended: int
    total: int


_STUCK_TURNS = 100_000


def replay(
    core: Core,
    jobs: Sequence[Job],
    slo: SLO,
    watch: Callable[[Status], None] | None = None,
    judge: Judge | None = None,
) -> Replay:
    """Give `core` every job when it is due and wait for all of them.

    Args:
        core: fresh and idle.
        jobs: in order of `due_s`.
        slo: every request's objective.
        watch: called after each turn of the loop.
        judge: may cut it short; whoever has not ended by then is cancelled.

    Raises:
        SmpartError: the core stays busy without its clock moving on.
        KeyboardInterrupt: after everything in flight was cancelled and has ended.
    """
    started = core.now()
    requests = [
        Request(i, job.prompt, job.params, slo, job.best_effort, hashes=job.hashes, arrival=started + job.due_s)
        for i, job in enumerate(jobs)
    ]
    cut = False
    try:
        cut = _drive(core, requests, jobs, started, watch, judge)
    except KeyboardInterrupt:
        _abort(core, requests)
        raise
    if cut:
        _abort(core, requests)
    served = tuple(_served(request, job, started) for request, job in zip(requests, jobs, strict=True))
    ends = [s.times_s[-1] if s.times_s else s.due_s for s in served]
    reachable = judge.reachable if cut and judge is not None else None
    return Replay(served, core.log, started, max(ends, default=0.0), reachable)


def _drive(
    core: Core,
    requests: list[Request],
    jobs: Sequence[Job],
    started: float,
    watch: Callable[[Status], None] | None,
    judge: Judge | None,
) -> bool:
    """Serve all requests; whether the judge has ended it before."""
    upcoming = ended = still = 0
    while upcoming < len(requests) or not core.idle:
        before = core.now()
        refused = []
        while upcoming < len(requests) and _due(requests[upcoming]) <= before:
            if not _add(core, requests[upcoming]):
                refused.append(requests[upcoming])
            upcoming += 1
        gone = refused + core.turn(_due(requests[upcoming]) if upcoming < len(requests) else None)
        ended += len(gone)
        now = core.now()
        still = 0 if gone or now > before else still + 1
        if still > _STUCK_TURNS:
            raise SmpartError(f"replay: {len(requests) - ended} requests are left and the clock does not move on")
        if watch is not None:
            watch(Status(now - started, upcoming, ended, len(requests)))
        if judge is not None:
            last = [_served(request, jobs[request.id], started) for request in gone]
            if judge.lost(now - started, lambda index: bool(requests[index].times), last):
                return True
    return False


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
    for request in requests:
        request.finish(FinishReason.CANCELLED)


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
        job.best_effort,
    )
