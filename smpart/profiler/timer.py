"""Runs works on idle lanes, alone or side by side, and tells which of them were measured in a steady state."""

from __future__ import annotations

from collections.abc import Sequence

from smpart.errors import SmpartError
from smpart.partition import Completion, Lanes, Side, Work
from smpart.profiler.works import Works

_TURN_S, _TURN_SHARE = 1e-3, 0.2
"""From one work to the next a lane may take so long, or so much of the shorter one: it is what running over and over
means there."""

_STEADY, _NEARLY = 0.999, 0.95
"""Share of a forward beside which its neighbour should have run, and where none is so steady, must have."""


class WorkerLostError(SmpartError):
    """A lane's worker died with works of ours; it is being replaced."""


class ForwardError(SmpartError):
    """The model's own forward failed; the lanes go on."""


class Timer:
    """Times works on lanes that nobody else uses. Between calls nothing is in flight.

    Whatever is called raises `WorkerLostError`, `ForwardError`, and what `Lanes.wait` raises.
    """

    def __init__(self, lanes: Lanes, works: Works) -> None:
        self._lanes = lanes
        self._works = works

    def one(self, work: Work) -> Completion:
        """One run, alone."""
        return self.alone(work, 1)[0]

    def alone(self, work: Work, count: int) -> list[Completion]:
        """`count` runs, one after another without a pause."""
        flow = _Flow(self._lanes, self._works)
        while len(flow.done) < count:
            flow.fill(work, count)
            flow.wait()
        return flow.finish()

    def beside(self, work: Work, neighbour: Work, count: int) -> tuple[list[Completion], list[Completion]]:
        """`count` runs of a work, while its neighbour runs over and over, from before the first to after the last.

        Returns:
            The works' completions, and the neighbours', those before and after included.
        """
        flow = _Flow(self._lanes, self._works)
        while not flow.of(neighbour.side):
            flow.fill(neighbour)
            flow.wait()
        while len(flow.of(work.side)) < count:
            flow.fill(neighbour)
            flow.fill(work, count)
            flow.wait()
        flow.finish()
        return flow.of(work.side), flow.of(neighbour.side)


def collect(lanes: Lanes, count: int) -> list[Completion]:
    """At least `count` completions of works in flight.

    Raises:
        WorkerLostError, ForwardError: one of them failed; others may be in flight still.
    """
    done: list[Completion] = []
    while len(done) < count:
        done += lanes.wait(None)
    _require_sound(done)
    return done


def _require_sound(done: Sequence[Completion]) -> None:
    faults = [completion.fault for completion in done if completion.fault is not None]
    if any(fault.lost for fault in faults):
        raise WorkerLostError(next(fault.message for fault in faults if fault.lost))
    if faults:
        raise ForwardError(faults[0].message)


class _Flow:
    """Works in flight: as many of each side as its lane takes, so that none waits for us."""

    def __init__(self, lanes: Lanes, works: Works) -> None:
        self.done: list[Completion] = []
        self._lanes = lanes
        self._works = works
        self._launched = dict.fromkeys(Side, 0)

    def of(self, side: Side) -> list[Completion]:
        """Completions of a side so far."""
        return [completion for completion in self.done if completion.work.side is side]

    def fill(self, work: Work, most: int | None = None) -> None:
        """Launch a work until its lane is full, or `most` were launched."""
        side = work.side
        while self._launched[side] - len(self.of(side)) < self._lanes.depth:
            if most is not None and self._launched[side] >= most:
                return
            self._lanes.launch(self._works.again(work))
            self._launched[side] += 1

    def wait(self) -> None:
        """Take in what completes next. When something failed, nothing is in flight any more."""
        self.done += self._lanes.wait(None)
        if any(completion.fault is not None for completion in self.done):
            while self._flying:
                self.done += self._lanes.wait(None)
            _require_sound(self.done)

    def finish(self) -> list[Completion]:
        """Wait for all that is in flight; everything that completed, in order."""
        while self._flying:
            self.wait()
        return self.done

    @property
    def _flying(self) -> int:
        return sum(self._launched.values()) - len(self.done)


def steady(runs: Sequence[Completion], neighbours: Sequence[Completion]) -> list[Completion]:
    """The runs beside which the neighbour ran all the while, turns from one of its works to the next included.

    Where no run had it all the while, those that had it for nearly all.
    """
    spans = _joined(sorted((n.started, n.finished) for n in neighbours))
    shares = [_covered(run, spans) / run.seconds for run in runs]
    least = _STEADY if max(shares, default=0.0) >= _STEADY else _NEARLY
    return [run for run, share in zip(runs, shares, strict=True) if share >= least]


def _joined(spans: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    joined: list[tuple[float, float]] = []
    last = 0.0
    for start, end in spans:
        turn = min(_TURN_S, _TURN_SHARE * min(last, end - start))
        if joined and start - joined[-1][1] <= turn:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((start, end))
        last = end - start
    return joined


def _covered(run: Completion, spans: Sequence[tuple[float, float]]) -> float:
    return sum(max(0.0, min(end, run.finished) - max(start, run.started)) for start, end in spans)
