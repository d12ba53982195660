"""A batch of experiments, measured in rounds: each is visited once a round, in an order that is drawn anew.

So whatever drifts meets all alike. In each round two anchors are visited too; a round in which they are off is
suspect. Visits that something disturbed are repeated, within a limit.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from smpart.partition import Lanes
from smpart.profiler.design import ROUNDS, Choice
from smpart.profiler.disturbance import Anchors, disturbed
from smpart.profiler.sample import Conditions, Sample
from smpart.profiler.timer import ForwardError, WorkerLostError
from smpart.profiler.visit import Visitor
from smpart.profiler.witness import Witness

logger = logging.getLogger(__name__)

REDO = 2
"""Further visits to an experiment, if some were disturbed,"""
_REDO_SHARE = 0.2
"""as long as they take no more than this of all the time: where it is never quiet, waiting for quiet is in vain."""
_LOST = 3
"""Times that a worker may die in one and the same visit."""

Repeats = tuple[tuple[float, ...], ...]
"""Seconds, for each point of an experiment."""


class Visit(NamedTuple):
    """What one visit gave; `suspect` if something is known to have disturbed it."""

    number: int
    repeats: Repeats
    suspect: bool


@dataclass(slots=True)
class Tally:
    """An experiment and all visits to it in this batch."""

    choice: Choice
    visits: list[Visit] = field(default_factory=list)
    moment: float = 0.0
    conditions: Conditions = field(default_factory=Conditions)
    seconds: float = 0.0
    failed: bool = False

    @property
    def missing(self) -> bool:
        """Whether more undisturbed visits are wanted and may be made."""
        sound = sum(not visit.suspect for visit in self.visits)
        return not self.failed and sound < self.choice.rounds and len(self.visits) < self.choice.rounds + REDO

    def samples(self, visitor: Visitor, noise: float) -> list[Sample]:
        """What is kept of its repeats: undisturbed ones, or where all visits were suspect, what there is."""
        if self.failed or not self.visits:
            return []
        sound = [visit for visit in self.visits if not visit.suspect] or self.visits
        made: list[Sample] = []
        points = self.choice.experiment.points(visitor.pressure(self.choice.experiment))
        for index, point in enumerate(points):
            everything = sum(len(visit.repeats[index]) for visit in self.visits)
            seconds = [value for visit in sound for value in visit.repeats[index]]
            slow = disturbed(seconds, noise)
            kept = tuple(value for value, out in zip(seconds, slow, strict=True) if not out)
            if kept:
                stage, count = self.choice.stage, everything - len(kept)
                made.append(Sample(point, kept, count, stage, self.moment, self.conditions))
        return made


class Rounds:
    """Measures batches on idle lanes.

    Args:
        anchors: choices of stage ``anchor``, visited in every round.
        conditions: the device's, now.
        seed: of the order in a round.
    """

    def __init__(
        self,
        lanes: Lanes,
        visitor: Visitor,
        anchors: Sequence[Choice],
        witness: Witness,
        conditions: Callable[[], Conditions],
        seed: int,
    ) -> None:
        self._lanes = lanes
        self._visitor = visitor
        self._anchors = anchors
        self._witness = witness
        self._conditions = conditions
        self._random = random.Random(seed)
        self.known = Anchors()
        self.tallies: list[Tally] = []
        self._took = self._redid = 0.0
        self._rounds = self._suspect = 0

    @property
    def suspect(self) -> float:
        """Share of all rounds that something disturbed as a whole."""
        return self._suspect / max(1, self._rounds)

    def measure(self, choices: Sequence[Choice]) -> None:
        """Visit all of a batch, and its anchors; `samples` then gives what was measured.

        A forward that fails is left out, with a warning. Raises `WorkerLostError`, and what `Lanes.wait` raises.
        """
        self.tallies = [Tally(choice) for choice in (*choices, *self._anchors)]
        for number in range(ROUNDS):
            self._took += self._round(number, [tally for tally in self.tallies if number < tally.choice.rounds])
        for number in range(ROUNDS, ROUNDS + REDO):
            again = [tally for tally in self.tallies if tally.missing]
            if self._redid <= _REDO_SHARE * self._took and any(t.choice.stage != "anchor" for t in again):
                self._redid += self._round(number, again)

    def samples(self) -> list[Sample]:
        """Of every experiment whose visits are all made; also after an interrupt."""
        whole = [tally for tally in self.tallies if len(tally.visits) >= tally.choice.rounds]
        return [sample for tally in whole for sample in tally.samples(self._visitor, self.known.noise)]

    def _round(self, number: int, tallies: list[Tally]) -> float:
        """Visit all, and mark what is suspect; seconds that it took."""
        self._random.shuffle(tallies)
        began, mark, off = self._lanes.now(), self._witness.mark(), False
        for tally in tallies:
            self._visit(number, tally)
            if tally.choice.stage == "anchor" and tally.visits:
                off |= self._anchor_off(tally)
        objection = self._witness.objection(mark)
        self._rounds += 1
        if objection is not None or off:
            self._suspect += 1
            logger.info("a round was disturbed: %s", objection or "the anchors took longer than they do")
            for tally in tallies:
                tally.visits = [v._replace(suspect=v.suspect or v.number == number) for v in tally.visits]
        return self._lanes.now() - began

    def _visit(self, number: int, tally: Tally) -> None:
        if tally.failed:
            return
        if not tally.visits:
            tally.moment, tally.conditions = time.time(), self._conditions()
        began, mark = self._lanes.now(), self._witness.mark()
        try:
            repeats = self._surviving(tally.choice)
        except ForwardError as error:
            if tally.choice.stage == "anchor":
                raise  # where the smallest forwards fail, nothing can be measured
            logger.warning("%s is left out: %s", tally.choice.experiment, error)
            tally.failed = True
            return
        tally.seconds += self._lanes.now() - began
        tally.visits.append(Visit(number, repeats, self._witness.objection(mark) is not None))

    def _surviving(self, choice: Choice) -> Repeats:
        """A visit, made again if a worker dies in it: another takes its place at once."""
        for _ in range(_LOST - 1):
            try:
                return self._visitor.visit(choice.experiment, choice.expected)
            except WorkerLostError as error:
                logger.warning("a worker died in %s (%s): it is measured again", choice.experiment, error)
        return self._visitor.visit(choice.experiment, choice.expected)

    def _anchor_off(self, tally: Tally) -> bool:
        name, seconds = str(tally.choice.experiment), sorted(tally.visits[-1].repeats[0])
        middle = seconds[len(seconds) // 2]
        off = self.known.off(name, middle)
        self.known.learn(name, middle)
        return off
