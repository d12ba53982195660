"""What is asked of the device, and what serving the prompts at some pace would be worth."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from itertools import accumulate
from typing import NamedTuple

EARLY, LATE = 0.5, 0.2
"""A first token counts in full if it is predicted this share of its time early, for nothing if it is this share late,
and in proportion between: predictions err, and somebody may arrive meanwhile."""
LATENESS = 0.02
"""What a first token that is worth nothing any more costs for each time its time that it is late."""
_MOST_LATE = 2.0
_NEVER = 1e12
"""A pace that no prefill reaches."""


class Demand(NamedTuple):
    """What is asked of the device.

    Attributes:
        tokens: [running] when each reader's next token is due at the latest, ascending.
        paces: [running] when it would be in step with the reader's pace, ascending; whoever can catch up no more is
            left out.
        price: what a second is worth that a reader falls behind the pace.
        tpot, itl: the tightest TPOT and ITL objectives among them.
        waited: seconds that the readers will have been without a token when the next step can begin.
        work: [prefills] seconds of each on the whole device, alone, in the order they will be served.
        first: [prefills] when each one's first token is due.
        weight: [prefills] requests each stands for that were promised something; of best effort nothing is lost.
        rate: seconds of prefill work (whole device, alone) in one prompt token.
        group: seconds that the smallest piece of prefill takes on the whole device.
        starved: prefill must get on now.
        survey: splits far from the last one shall be looked at too.
    """

    tokens: list[float]
    paces: list[float]
    price: float
    tpot: float
    itl: float
    waited: float
    work: list[float]
    first: list[float]
    weight: list[int]
    rate: float
    group: float
    starved: bool
    survey: bool


class Firsts:
    """What first tokens are worth for any pace of prefill from one moment on.

    Each prefill has a pace below which it is late; sorted by it, the early and the late ones are ends of the line, and
    what is between them is worth a sum that is known.
    """

    __slots__ = ("_needs", "_sums", "jobs", "total")

    def __init__(self, demand: Demand, start: float) -> None:
        self.jobs: list[tuple[float, float, int]] = []
        line = []
        done = 0.0
        for work, first, weight in zip(demand.work, demand.first, demand.weight, strict=True):
            done += work
            slack = first - start
            self.jobs.append((done, slack, weight))
            line += [done / slack if slack > 0.0 else _NEVER] * weight
        line.sort()
        self._needs = line
        self._sums = [0.0, *accumulate(line)]
        self.total = len(line)

    def at(self, pace: float) -> tuple[float, int]:
        """What they are worth in all, and how many are in time."""
        needs, sums = self._needs, self._sums
        early, late = bisect_right(needs, pace * (1.0 - EARLY)), bisect_left(needs, pace * (1.0 + LATE))
        some = (late - early) * (1.0 + LATE) - (sums[late] - sums[early]) / pace
        behind = sum(min(_MOST_LATE, need / pace - 1.0) for need in needs[late:]) if late < len(needs) else 0.0
        return early + some / (EARLY + LATE) - LATENESS * behind, bisect_right(needs, pace)

    def ends(self, head: float, pace: float) -> list[float]:
        """Seconds until each prefill is done, if `head` seconds at full pace come before the rest at `pace`."""
        return [done if done <= head else head + (done - head) / pace for done, _, _ in self.jobs]

    def after(self, ends: list[float]) -> tuple[float, int]:
        """What they are worth in all, and how many are in time, if they end so."""
        kept, worth = 0, 0.0
        for (_, slack, weight), end in zip(self.jobs, ends, strict=True):
            share = end / slack if slack > 0.0 else _NEVER
            if share <= 1.0:
                kept += weight
            if share < 1.0 + LATE:
                worth += weight * min(1.0, (1.0 + LATE - share) / (EARLY + LATE))
            else:
                worth -= weight * LATENESS * min(_MOST_LATE, share - 1.0)
        return worth, kept

    def needed(self, ends: list[float]) -> float:
        """Pace at which each is early that is not too late if they end so."""
        needed = 0.0
        for (done, slack, weight), end in zip(self.jobs, ends, strict=True):
            if weight and end < (1.0 + LATE) * slack:
                needed = max(needed, done / (slack * (1.0 - EARLY)))
        return min(1.0, needed)
