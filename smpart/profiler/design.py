"""Which experiments come next: the corners, then points that fill the space, then where a model is least sure.

The space is filled with scrambled Halton points in log space (scipy.stats.qmc), a sequence for each kind of
experiment. Kinds take turns by the time they have had.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.stats import qmc

from smpart.partition import Split
from smpart.profiler.experiment import Experiment
from smpart.profiler.forecast import Forecast
from smpart.profiler.sample import Point, Pressure, Sample
from smpart.profiler.space import DIMENSIONS, Cube, Kind, Space, covering
from smpart.profiler.visit import LONG_S, MOST, VISIT_S

Doubt = Callable[[Sequence[Sample], Sequence[Point]], NDArray[np.float64]]
"""How unsure a model fitted to these samples is about each of these points; higher: measure it first."""

SHARES = {Kind.PREFILL: 0.22, Kind.DECODE: 0.22, Kind.HYBRID: 0.08, Kind.PAIR: 0.48, Kind.PRESSED: 0.12}
"""Of the time, as far as there are such experiments."""
ROUNDS = 3
"""Visits to an experiment,"""
_DEAR_S, _DEAR_ROUNDS = 2.0, 2
"""and to one whose visits take longer than this."""
_COVERING = 6
"""Splits that the space is filled over."""
_CANDIDATES = 160
_MOST_NAMED = 40
"""Of those, so many may be named at a time, however short they are: to take all would be no choice."""
_ALIKE = 0.15
"""Distance in the cube within which two candidates would tell the same."""
_TRIES = 400
"""Points of a sequence that may all be known already before a kind counts as exhausted."""


class Choice(NamedTuple):
    """An experiment that is worth its time.

    Attributes:
        stage: see `Sample`.
        expected: seconds that its forward is expected to take; of a pair, the prefill.
        seconds: that one visit is expected to take.
    """

    experiment: Experiment
    stage: str
    expected: float
    seconds: float

    @property
    def rounds(self) -> int:
        """How often it should be visited."""
        return _DEAR_ROUNDS if self.seconds > _DEAR_S else ROUNDS

    @property
    def cost(self) -> float:
        """Seconds of all visits."""
        return self.seconds * self.rounds


class Design:
    """Chooses experiments; the same ones again for the same seed and measurements.

    Args:
        forecast: what forwards will take.
        dearest: seconds that all rounds of a forward may take: what would take longer is made smaller.
    """

    def __init__(self, space: Space, seed: int, forecast: Forecast, dearest: float) -> None:
        self._space = space
        self._seed = seed
        self._forecast = forecast
        self._dearest = dearest
        self._known: set[Point] = set()
        self._spent = dict.fromkeys(space.kinds(), 0.0)
        covers = covering(space.splits, _COVERING)
        self._sequences = {kind: self._sequence(kind, covers) for kind in self._spent}

    def remember(self, samples: Iterable[Sample]) -> None:
        """Take in what was measured in earlier runs; it is not measured again."""
        for sample in samples:
            if sample.stage != "anchor":
                self._known.add(_plain(sample.point))
                kind = _kind(sample.point)
                if kind in self._spent:
                    self._spent[kind] += sum(sample.seconds)

    def spent(self, choice: Choice, seconds: float) -> None:
        """What was chosen took so long; until this is said it counts with what was expected."""
        self._spent[Kind.of(choice.experiment)] += seconds - choice.cost

    def choice(self, experiment: Experiment, stage: str) -> Choice:
        """An experiment with what it is expected to take."""
        times = [self._forecast(point) for point in experiment.key]
        longest = max(times)
        if experiment.beside:
            return Choice(experiment, stage, times[0], 1.5 * longest + sum(times))
        again = min(max(longest, VISIT_S), MOST * longest) if longest < LONG_S else 0.0
        return Choice(experiment, stage, longest, longest + again)

    def fill(self) -> Choice | None:
        """The next one that fills the space; None when all that there is was measured."""
        for kind in self._turns():
            for experiment in itertools.islice(self._sequences[kind], _TRIES):
                choice = self._affordable(experiment, "fill")
                if self._take(choice):
                    return choice
            self._sequences[kind] = iter(())
        return None

    def doubtful(self, samples: Sequence[Sample], doubt: Doubt, seconds: float) -> list[Choice]:
        """Those that a model is least sure about for what they cost, and that differ, for about so much time.

        All are of the kind whose turn it is: doubts about one kind and another cannot be weighed against each other.
        """
        places, choices = self._candidates(self._turns()[0], len(samples))
        if not choices:
            return []
        points = [choice.experiment.key for choice in choices]
        asked = doubt(samples, [point for group in points for point in group])
        sums = np.add.reduceat(asked, np.cumsum([0, *(len(group) for group in points[:-1])]))
        costs = np.array([choice.cost for choice in choices])
        score = sums / (costs + np.median(costs))
        return self._different(places, choices, score, seconds)

    def _candidates(self, kind: Kind, number: int) -> tuple[Cube, list[Choice]]:
        """Some that are not known, and where in the cube they lie."""
        places: list[Cube] = []
        choices: list[Choice] = []
        for at in itertools.islice(_halton(self._seed, kind, 1 + number), _CANDIDATES):
            choice = self._affordable(self._space.experiment(kind, at), "active")
            if not self._known.issuperset(choice.experiment.key):
                places.append(at)
                choices.append(choice)
        return np.array(places), choices

    def _different(self, places: Cube, choices: Sequence[Choice], score: Cube, seconds: float) -> list[Choice]:
        chosen: list[Choice] = []
        fresh = np.ones(len(choices))
        while seconds > 0 and len(chosen) < min(_MOST_NAMED, len(choices)):
            best = int(np.argmax(score * fresh))
            if score[best] * fresh[best] <= 0:
                break
            distance = np.linalg.norm(places - places[best], axis=1)
            fresh *= -np.expm1(-((distance / _ALIKE) ** 2))
            if self._take(choices[best]):
                chosen.append(choices[best])
                seconds -= choices[best].cost
        return chosen

    def _take(self, choice: Choice) -> bool:
        """Whether it is new; from now on it is known."""
        if self._known.issuperset(choice.experiment.key):
            return False
        self._known.update(choice.experiment.key)
        self._spent[Kind.of(choice.experiment)] += choice.cost
        return True

    def _turns(self) -> list[Kind]:
        """Kinds, the one that had the least of its share of the time first."""
        return sorted(self._spent, key=lambda kind: self._spent[kind] / SHARES[kind])

    def _sequence(self, kind: Kind, covers: Sequence[Split]) -> Iterator[Experiment]:
        places = itertools.chain(self._space.corners(kind), _halton(self._seed, kind, 0))
        return (self._space.experiment(kind, at, covers) for at in places)

    def _affordable(self, experiment: Experiment, stage: str) -> Choice:
        """The experiment, made smaller until it takes no longer than it may."""
        while True:
            longest = max(self._forecast(point) for point in experiment.key)
            smaller = self._smaller(experiment)
            if ROUNDS * longest <= self._dearest or smaller == experiment:
                return self.choice(experiment, stage)
            experiment = smaller

    def _smaller(self, experiment: Experiment) -> Experiment:
        """Half as large where it takes longest; the same if that cannot be."""
        prefill, decode = experiment.prefill, experiment.decode
        units = experiment.split.units(experiment.side)
        if prefill.tokens and decode.tokens:
            alone = [self._forecast(Point(shape, units)) for shape in (prefill, decode)]
            halve_chunks = alone[0] >= alone[1]
        else:
            halve_chunks = prefill.tokens > 0
        if halve_chunks and max(new + old for new, old in experiment.chunks) > 1:
            chunks = tuple((-(-new // 2), old // 2) for new, old in experiment.chunks)
            return replace(experiment, chunks=chunks)
        if experiment.context > 16:
            return replace(experiment, context=experiment.context // 2)
        return replace(experiment, rows=-(-experiment.rows // 2))


def _halton(seed: int, kind: Kind, number: int) -> Iterator[Cube]:
    """A sequence of its own for each kind and number."""
    entropy = np.random.SeedSequence((seed, list(Kind).index(kind), number))
    engine = qmc.Halton(DIMENSIONS, scramble=True, seed=np.random.default_rng(entropy))
    while True:
        yield from engine.random(64)


def _plain(point: Point) -> Point:
    """As `Experiment.key` has it: a contender by its name."""
    return replace(point, contender=Pressure(point.contender.kind))


def _kind(point: Point) -> Kind:
    if point.contender.kind:
        return Kind.PRESSED
    if not point.alone:
        return Kind.PAIR
    if point.shape.hybrid:
        return Kind.HYBRID
    return Kind.PREFILL if point.shape.prefill_tokens else Kind.DECODE
