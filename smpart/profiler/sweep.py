"""A sweep: measures what a design chooses, batch by batch, until the time is spent; each batch is kept as it ends."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from smpart.errors import SmpartError
from smpart.partition import Lanes
from smpart.profiler.conditions import watched
from smpart.profiler.design import Choice, Design, Doubt
from smpart.profiler.experiment import Experiment
from smpart.profiler.forecast import Expected, Forecast
from smpart.profiler.rounds import Rounds
from smpart.profiler.space import Space
from smpart.profiler.store import Store
from smpart.profiler.timer import Timer, WorkerLostError
from smpart.profiler.visit import Visitor
from smpart.profiler.witness import NoWitness, Witness
from smpart.profiler.works import Works

BATCH_S, _BATCH = 12.0, 12
"""A batch takes about so long, and has no more experiments than this: no more is lost by a kill."""
_DEAREST = 0.04
"""Share of the budget that one experiment may take."""
_FILL = 0.5
"""Share of the budget after which a model that has doubts is asked."""
_ASK = 0.1
"""Share of the budget for what it names at a time: fitting it takes a while."""
_ANCHOR_TOKENS, _ANCHOR_CONTEXT = (64, 16, 4, 1), 64
_ANCHOR_SHARE = 0.15
"""Share of a batch that the anchors may take: their prefill is the longest of these for which they do not."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a sweep is.

    Attributes:
        stage: of what is measured now: ``fill`` or ``active``.
        points: measured so far, over all runs; anchors count once a batch.
        disturbed: repeats thrown away so far, in this run.
        spent_s, left_s: measuring time, over all runs.
        noise: the machine's own, in this run: relative standard deviation of an anchor from round to round.
        suspect: share of rounds, in this run, that something disturbed as a whole.
    """

    stage: str
    points: int
    disturbed: int
    spent_s: float
    left_s: float
    noise: float
    suspect: float


class Sweep:
    """Measures on lanes that nobody else uses.

    Args:
        works: over the lanes' board.
        store: open for writing; what is in it already is not measured again.
        seconds: of measuring, those of earlier runs included.
        seed: of the design.
        expected: about what forwards take: a guess will do.
        doubt: where a model is unsure; None: the whole time fills the space.
        witness: who tells of disturbances from outside.
    """

    def __init__(
        self,
        lanes: Lanes,
        works: Works,
        space: Space,
        store: Store,
        seconds: float,
        *,
        seed: int,
        expected: Expected,
        doubt: Doubt | None = None,
        witness: Witness | None = None,
    ) -> None:
        self._lanes = lanes
        self._store = store
        self._seconds = seconds
        self._seed = seed
        self._doubt = doubt
        self._witness = witness if witness is not None else NoWitness()
        self._visitor = Visitor(Timer(lanes, works), works)
        self._forecast = Forecast(expected)
        self._samples = store.samples()
        self._disturbed = 0
        for sample in self._samples:
            self._forecast.learn(sample.point, sample.median)
        self._design = Design(space, seed, self._forecast, _DEAREST * seconds)
        self._design.remember(self._samples)
        self._queue: list[Choice] = []
        self._anchors = self._make_anchors(space, works)

    def run(self) -> Iterator[Progress]:
        """Measure until the time is spent or there is nothing new; tells after each batch how far it is.

        Raises:
            SmpartError: workers keep dying, or samples cannot be saved; what was saved stays.
        """
        with watched(self._lanes.device) as conditions:
            number = len(self._samples)
            rounds = Rounds(
                self._lanes, self._visitor, self._anchors, self._witness, conditions, self._seed * 1_000_003 + number
            )
            while self._left > 0 and (batch := self._batch()):
                self._measure(rounds, batch)
                yield self._progress(batch[0].stage, rounds)

    @property
    def _spent(self) -> float:
        return self._store.minutes * 60

    @property
    def _left(self) -> float:
        return self._seconds - self._spent

    def _batch(self) -> list[Choice]:
        batch: list[Choice] = []
        room = min(BATCH_S, self._left) - sum(choice.cost for choice in self._anchors)
        while len(batch) < _BATCH and (choice := self._next()) is not None:
            if batch and choice.cost > room:
                self._queue.insert(0, choice)
                break
            batch.append(choice)
            room -= choice.cost
        return batch

    def _next(self) -> Choice | None:
        if not self._queue and self._doubt is not None and self._spent >= _FILL * self._seconds:
            self._queue = self._design.doubtful(self._samples, self._doubt, max(2 * BATCH_S, _ASK * self._seconds))
        return self._queue.pop(0) if self._queue else self._design.fill()

    def _measure(self, rounds: Rounds, batch: Sequence[Choice]) -> None:
        """Measure a batch and save it; what is whole of it also when it ends too early."""
        began = self._lanes.now()
        try:
            rounds.measure(batch)
        except WorkerLostError as error:
            raise SmpartError(
                f"workers keep dying while they are measured, last: {error}. What was measured before is safe"
            ) from error
        finally:
            self._keep(rounds, self._lanes.now() - began)

    def _keep(self, rounds: Rounds, seconds: float) -> None:
        samples = rounds.samples()
        self._store.add(samples, seconds=seconds)
        self._samples += samples
        self._disturbed += sum(sample.disturbed for sample in samples)
        for sample in samples:
            self._forecast.learn(sample.point, sample.median)
        for tally in rounds.tallies:
            if tally.choice.stage != "anchor":
                self._design.spent(tally.choice, tally.seconds)

    def _progress(self, stage: str, rounds: Rounds) -> Progress:
        noise, left = rounds.known.noise, max(0.0, self._left)
        return Progress(stage, len(self._samples), self._disturbed, self._spent, left, noise, rounds.suspect)

    def _make_anchors(self, space: Space, works: Works) -> list[Choice]:
        """A small prefill and a small decode step, each on the whole device; those of earlier runs, if there are."""
        before = {sample.point.shape.prefill_tokens for sample in self._samples if sample.stage == "anchor"} - {0}
        step = Experiment(space.splits[0], (), 1, min(_ANCHOR_CONTEXT, works.longest))
        decode = self._design.choice(step, "anchor")
        room = _ANCHOR_SHARE * BATCH_S - decode.cost
        sizes = sorted(before) or [tokens for tokens in _ANCHOR_TOKENS if tokens <= works.longest]
        prefills = [self._design.choice(Experiment(space.splits[-1], ((size, 0),)), "anchor") for size in sizes]
        return [next((prefill for prefill in prefills if prefill.cost <= room), prefills[-1]), decode]
