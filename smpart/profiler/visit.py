"""One visit to an experiment: it runs a few times, and the forwards that were in a steady state are kept.

A point's repeats come from several visits with others between them, so that drift meets all points alike.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from smpart.partition import Completion, Side, Split, Work
from smpart.profiler.experiment import Experiment
from smpart.profiler.sample import NOBODY, Pressure
from smpart.profiler.timer import Timer, steady
from smpart.profiler.works import Works
from smpart.runtime.contender import Contender, Pressed

LONG_S = 0.5
"""A forward that takes longer is not run a whole time only to warm up: a short one does."""
VISIT_S = 0.25
"""Short forwards are repeated for about so long in one visit,"""
MOST = 6
"""but no more often than this; as many of each side are kept of a longer visit."""
_TRIES = 3
_MOST_BESIDE = 256
"""Runs of a short forward beside a long one."""
_PRESS_S = 0.02
"""About how long one launch of a contender lasts."""


class Visitor:
    """Visits experiments on idle lanes.

    Whatever is called raises as `Timer` does, and `UsageError` for what does not fit the board.
    """

    def __init__(self, timer: Timer, works: Works) -> None:
        self._timer = timer
        self._works = works
        self._pace: dict[Experiment, tuple[float, float]] = {}
        self._pressures: dict[tuple[str, Side, Split], tuple[Work, Pressure]] = {}

    def pressure(self, experiment: Experiment) -> Pressure:
        """What the contender beside it asks of the device, measured alone; `NOBODY` without one."""
        return self._contender(experiment)[1] if experiment.contender else NOBODY

    def visit(self, experiment: Experiment, expected: float) -> tuple[tuple[float, ...], ...]:
        """Seconds of forwards in a steady state, for each of the experiment's points; none where none was.

        Args:
            expected: about how many seconds its forward (of a pair: the prefill) takes.
        """
        if experiment.pair:
            work, neighbour = self._prefill(experiment), self._decode(experiment)
            return self._beside(experiment, work, neighbour, expected)
        if experiment.contender:
            neighbour = self._contender(experiment)[0]
            return self._beside(experiment, self._forward(experiment), neighbour, expected)[:1]
        return (self._alone(experiment, expected),)

    def _alone(self, experiment: Experiment, expected: float) -> tuple[float, ...]:
        if expected >= LONG_S:
            self._warm_up(experiment)
            return (self._timer.one(self._forward(experiment)).seconds,)
        work = self._forward(experiment)
        first = self._timer.one(work).seconds
        count = max(1, min(MOST, math.ceil(VISIT_S / first)))
        return _seconds(self._timer.alone(work, count))

    def _beside(
        self, experiment: Experiment, work: Work, neighbour: Work, expected: float
    ) -> tuple[tuple[float, ...], ...]:
        mine, beside = self._pace.get(experiment, (expected, 0.0))
        runs: list[Completion] = []
        others: list[Completion] = []
        for _ in range(_TRIES):
            count = max(1, math.ceil(min(VISIT_S, MOST * mine, 2 * VISIT_S) / mine), math.ceil(2 * beside / mine))
            ran, ran_beside = self._timer.beside(work, neighbour, min(count, _MOST_BESIDE))
            mine, beside = (min(c.seconds for c in done) for done in (ran, ran_beside))
            self._pace[experiment] = mine, beside
            runs, others = steady(ran, ran_beside), steady(ran_beside, ran)
            if runs and (others or not experiment.pair):
                break
        return _seconds(runs), _seconds(others)

    def _warm_up(self, experiment: Experiment) -> None:
        """A short forward in the same place: the lane's threads, and all weights once."""
        if experiment.side is Side.PREFILL:
            self._timer.one(self._works.prefill(experiment.split, ((1, 0),)))
        else:
            self._timer.one(self._works.decode(experiment.split, 1, 8))

    def _forward(self, experiment: Experiment) -> Work:
        if experiment.hybrid:
            return self._works.hybrid(experiment.split, experiment.chunks, experiment.rows, experiment.context)
        return self._prefill(experiment) if experiment.chunks else self._decode(experiment)

    def _prefill(self, experiment: Experiment) -> Work:
        return self._works.prefill(experiment.split, experiment.chunks)

    def _decode(self, experiment: Experiment) -> Work:
        return self._works.decode(experiment.split, experiment.rows, experiment.context)

    def _contender(self, experiment: Experiment) -> tuple[Work, Pressure]:
        """Launches of a suitable length, and what it asks of the device while nobody is beside it."""
        kind, side, split = experiment.contender, experiment.side.other, experiment.split
        if (kind, side, split) not in self._pressures:
            once = self._works.foreign(side, split, Contender(kind, 1))
            self._timer.one(once)  # compiles
            bursts = max(1, math.ceil(_PRESS_S / self._timer.one(once).seconds))
            work = self._works.foreign(side, split, Contender(kind, bursts))
            runs = self._timer.alone(work, MOST)[1:]
            seconds = sum(run.seconds for run in runs)
            pressed: list[Pressed] = [run.result for run in runs]
            rates = sum(p.bytes for p in pressed) / seconds, sum(p.flops for p in pressed) / seconds
            self._pressures[kind, side, split] = work, Pressure(kind, *rates)
        return self._pressures[kind, side, split]


def _seconds(runs: Sequence[Completion]) -> tuple[float, ...]:
    """Of at most `MOST` runs, evenly spread over them."""
    step = max(1, math.ceil(len(runs) / MOST))
    return tuple(run.seconds for run in runs[::step])
