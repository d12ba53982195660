"""Which way to run the next decode step and the prefills beside it: the heart of the controller, as arithmetic."""

from __future__ import annotations

from bisect import bisect_left
from enum import StrEnum
from itertools import accumulate
from typing import NamedTuple

from smpart.partition import Split
from smpart.predictor.estimate import Predictor
from smpart.scheduler.costs import Options
from smpart.scheduler.demand import Demand, Firsts
from smpart.scheduler.snapshot import Snapshot

KEEP_UP = 0.5
"""What being able to go on like this is worth, in deadlines kept: breaks ties only."""
RESERVE = 0.3
"""Share of a reader's time until the next token that a burst leaves alone: the last piece of it may take longer."""
GUARD = 1.06
"""Times its upper bound that a step may take: if it is too long for one reader's ITL, it mostly is for all."""
LONG = 1.15
"""The same for a hybrid step, which nothing can cut short, and whose size is made to fill the time there is."""
SMOOTH = 3.0
"""A gap of so many steps alone on the whole device, or of the TPOT objective if that is longer, is no stutter."""
STUTTER = 0.5
"""What a gap twice as long costs, in deadlines kept."""
GAIN = 0.15
"""What getting twice as much work done is worth, in deadlines kept: breaks ties only. Steps count the less the more
time the pace leaves for them: a slower step costs little then, for those that join meanwhile share it."""
STAY = 0.01
"""What not moving is worth, likewise."""
_FORCED = 4.0
"""Layer groups that a starved forward is given though readers have no time for them."""
_COARSE = 4
"""Splits looked at before their neighbours are, at least."""


class Kind(StrEnum):
    """A way to go on."""

    SPLIT = "split"
    HYBRID = "hybrid"
    DECODE = "decode alone"
    BURST = "prefill within slack"


class Choice(NamedTuple):
    """What was chosen.

    Attributes:
        split: where the next step runs.
        speed: pace of prefill, 1 = alone on the whole device.
        chunk: prompt tokens of a hybrid step.
        seconds: a burst: what is left for prefill on the whole device before the next step must begin.
        kept, asked: deadlines kept by it, of how many.
        drain: started forwards must end first, then a hybrid step is better.
        period: seconds from step to step.
    """

    kind: Kind
    split: Split
    speed: float
    chunk: int = 0
    seconds: float = 0.0
    kept: int = 0
    asked: int = 0
    drain: bool = False
    period: float = 0.0


_Way = tuple[float, "Kind", Split, float, int, float, int, float]
"""A way to go on, judged: score, kind, split, speed, chunk, seconds of a burst, deadlines kept, seconds from step to
step. The greater the better."""


class _Judge:
    """Scores ways to go on at one moment."""

    __slots__ = (
        "_alone",
        "_begin",
        "_begin_whole",
        "_demand",
        "_earliest",
        "_firsts",
        "_held",
        "_last",
        "_paces",
        "_smooth",
        "_step",
        "_whole",
        "asked",
    )

    def __init__(self, snapshot: Snapshot, demand: Demand, alone: float, last: Choice) -> None:
        self._begin = max(snapshot.now, snapshot.decode_lane.busy_until)
        begin = max(snapshot.now, snapshot.prefill_lane.busy_until)
        self._begin_whole = max(self._begin, begin)
        self._demand, self._alone, self._held, self._last = demand, alone, snapshot.split, last
        self._earliest = demand.tokens[0]
        self._smooth = max(demand.tpot, SMOOTH * alone)
        self._step = min(1.0, alone / demand.tpot)
        self._paces = [0.0, *accumulate(demand.paces)]
        self._firsts = Firsts(demand, begin)
        self._whole = Firsts(demand, self._begin_whole) if begin < self._begin_whole else self._firsts
        self.asked = len(demand.tokens) + self._firsts.total

    @property
    def spare(self) -> float:
        """Seconds until the first reader's token is due, from when the whole device is free."""
        return self._earliest - self._begin_whole

    def hybrids(self, whole: Split, options: Options, predictor: Predictor) -> list[_Way]:
        """Hybrid steps that take as long as the pace allows, as there is time, and as is needed."""
        most, rate = self.spare / LONG, self._demand.rate
        steady = min(self._demand.tpot, most)
        chunk, mean, upper = options.hybrid(predictor, steady)
        over = mean - chunk * rate
        needed = self._whole.needed(self._whole.ends(most, max(1e-9, 1.0 - over / mean)))
        enough = over / max(1e-9, 1.0 - needed) * upper / mean
        others = {most, min(most, max(enough, 2.0 * self._alone))} - {steady}
        steps = [(chunk, mean, upper), *(options.hybrid(predictor, limit) for limit in others)]
        speeds = [min(1.0, chunk * rate / mean) for chunk, mean, _ in steps]
        return [
            self.way(_HYBRID, whole, mean, upper, speed, chunk)
            for (chunk, mean, upper), speed in zip(steps, speeds, strict=True)
        ]

    def way(self, kind: Kind, split: Split, mean: float, upper: float, speed: float, chunk: int = 0) -> _Way:
        """Score one way that goes on as it begins.

        Args:
            mean, upper: seconds until the step has ended.
            speed: pace of prefill meanwhile, 1 = alone on the whole device.
        """
        proper = kind is _SPLIT
        begin = self._begin if proper and split.decode <= self._held.decode else self._begin_whole
        firsts = self._firsts if proper and split.prefill <= self._held.prefill else self._whole
        stutter = self._stutter(mean, mean) if proper else 0.0
        end = begin + (LONG if chunk else GUARD) * upper
        score, kept = self._score(end, upper, mean, speed, firsts.at(max(speed, 1e-9)), stutter)
        if kind is self._last.kind and (not proper or split == self._last.split):
            score += STAY
        return score, kind, split, speed, chunk, 0.0, kept, mean

    def bursts(self, split: Split, mean: float, upper: float, beside: float) -> list[_Way]:
        """Bursts that keep to the pace, and such that use all the time there is; none if there is none."""
        demand = self._demand
        most = self.spare - RESERVE * (self.spare + demand.waited) - upper
        steady = min(most, self._smooth - upper - demand.waited)
        lengths = {most} if most > demand.group else set()
        if steady + demand.waited > demand.group:
            lengths.add(steady)
        return [self._burst(split, mean, upper, beside, max(0.0, length)) for length in lengths]

    def _burst(self, split: Split, mean: float, upper: float, beside: float, most: float) -> _Way:
        """Score bursts of prefill on the whole device between steps on `split`.

        Readers may wait for a token until it is due: at once as long as the earliest of them can, from then on as
        long as their pace allows. No more of that is used than what is asked for needs.

        Args:
            mean, upper: seconds of a step.
            beside: pace of prefill during a step.
        """
        demand, firsts = self._demand, self._whole
        costs = mean * (1.0 - beside)
        fastest = max(1e-9, 1.0 - costs / max(upper, _PACE * demand.tpot))
        ends = firsts.ends(most, fastest)
        needed = firsts.needed(ends) or 1.0  # where nobody can be saved, what waits has to get on all the same
        length = min(most + demand.waited, max(0.0, costs / max(1e-9, 1.0 - needed) - mean))
        now = min(most, length - demand.waited)
        period = mean + length
        end = self._begin_whole + max(0.0, now) + upper
        speed = 1.0 - costs / period
        stutter = self._stutter(period if beside > 0.0 else length, mean)
        score, kept = self._score(end, upper, period, speed, firsts.after(ends), stutter)
        if self._last.kind is _BURST:
            score += STAY
        return score, _BURST, split, speed, 0, now, kept, period

    def _stutter(self, period: float, step: float) -> float:
        """Share of those whose prompts end beside decoding that get their second token too late for their ITL.

        A prompt ends at any moment of `period`, in which one step begins; its second token is out of the next one.
        """
        late = period + step - self._demand.itl
        return min(1.0, late / period) if late > 0.0 and period > 0.0 else 0.0

    def _score(
        self, end: float, upper: float, mean: float, speed: float, firsts: tuple[float, int], stutter: float
    ) -> tuple[float, int]:
        demand = self._demand
        tokens = len(demand.tokens)
        if end - 1e-9 > self._earliest:
            tokens -= bisect_left(demand.tokens, end - 1e-9)
        gap = demand.waited + end - self._begin_whole
        worth = firsts[0] if firsts[0] < 0.0 else firsts[0] * (1.0 - stutter)
        done = self._step * self._alone / mean + speed
        score = tokens + worth + GAIN * done - STUTTER * max(0.0, gap / self._smooth - 1.0)
        behind = bisect_left(demand.paces, end)
        score -= demand.price * (behind * end - self._paces[behind])
        return score + KEEP_UP if upper <= demand.tpot else score, tokens + firsts[1]


def choose(
    snapshot: Snapshot, splits: tuple[Split, ...], predictor: Predictor, options: Options, demand: Demand, last: Choice
) -> Choice:
    """The best way for decode rows and prefills that are both there.

    Args:
        splits: the proper ones, ascending, as `options` knows them.
        last: what was chosen before; it is kept unless another way is clearly better.
    """
    alone = options.alone
    judge = _Judge(snapshot, demand, alone.mean, last)
    whole = Split(0, snapshot.units)
    ways: list[_Way] = []
    if splits:
        best = _best_split(judge, splits, predictor, options, demand, last)
        place = splits.index(best[2])
        mean, upper, speed = options.beside(predictor, place)
        ways = [best, *judge.bursts(best[2], mean, upper, speed)]
    if snapshot.forwards or not splits:  # else a hybrid step does better
        ways += judge.bursts(whole, alone.mean, alone.upper, 0.0)
    if demand.starved:
        ways = [way for way in ways if _gets_on(way, demand.group)]
        if snapshot.forwards and not ways:  # whatever is late for it
            return Choice(_BURST, whole, 1.0, seconds=_FORCED * demand.group, asked=judge.asked)
    else:
        ways.append(judge.way(_DECODE, whole, alone.mean, alone.upper, 0.0))
    hybrid = max(judge.hybrids(whole, options, predictor))
    chosen = max(ways, default=hybrid)
    drain = bool(snapshot.forwards) and hybrid[0] > chosen[0]
    if drain:  # what is started has to get on for that
        on = max((way for way in ways if _gets_on(way, demand.group)), default=chosen)
        chosen = on if on[6] >= chosen[6] else chosen
    elif hybrid[0] > chosen[0]:
        chosen = hybrid
    _, kind, split, speed, chunk, seconds, kept, period = chosen
    return Choice(kind, split, speed, chunk, seconds, kept, judge.asked, drain, period)


def _gets_on(way: _Way, group: float) -> bool:
    """Whether prefill gets on with it before the next step has ended: a burst may have no time for a layer `group`."""
    return way[1] is _SPLIT or (way[1] is _BURST and (way[5] > group or not way[2].exclusive))


def _best_split(
    judge: _Judge, splits: tuple[Split, ...], predictor: Predictor, options: Options, demand: Demand, last: Choice
) -> _Way:
    """The best proper split: uphill from the last one, or, now and then, from the best one of a grid."""
    seen: dict[int, _Way] = {}

    def look(place: int) -> float:
        way = seen.get(place)
        if way is None:
            mean, upper, speed = options.beside(predictor, place)
            way = seen[place] = judge.way(_SPLIT, splits[place], mean, upper, speed)
        return way[0]

    count = len(splits)
    if demand.survey or last.split not in splits:
        stride = max(1, (count - 1) // _COARSE)
        best = max({*range(0, count, stride), count - 1}, key=look)
    else:
        best, stride = splits.index(last.split), 2
    while stride := stride // 2:
        best = max((best, *(place for place in (best - stride, best + stride) if 0 <= place < count)), key=look)
    return seen[best]


_PACE = 0.97
"""Share of the TPOT objective that steps follow each other at when bursts take all they can."""
_SPLIT, _HYBRID, _DECODE, _BURST = Kind
"""Plain names: looking a member up in its enumeration costs more than the comparison it is for."""
