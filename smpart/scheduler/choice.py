"""Which way to run the next decode step and the prefills beside it: the heart of the controller, as arithmetic."""

from __future__ import annotations

from bisect import bisect_left
from enum import StrEnum
from typing import NamedTuple

from smpart.partition import Split
from smpart.predictor.estimate import Predictor
from smpart.scheduler.costs import Options
from smpart.scheduler.snapshot import Snapshot

KEEP_UP = 0.5
"""What being able to go on like this is worth, in deadlines kept: breaks ties only."""
LATENESS = 0.02
"""What every missed first token at once costs when it comes a whole objective late, likewise."""
GAIN = 0.15
"""What getting twice as much work done is worth, likewise."""
STAY = 0.01
"""What not moving is worth, likewise."""
_COARSE = 4
"""Splits looked at before their neighbours are, at least."""


class Kind(StrEnum):
    """A way to go on."""

    SPLIT = "split"
    HYBRID = "hybrid"
    DECODE = "decode alone"
    PREFILL = "prefill within slack"


class Choice(NamedTuple):
    """What was chosen.

    Attributes:
        speed: pace of prefill, 1 = alone on the whole device.
        chunk: prompt tokens of a hybrid step.
        seconds: what is left for a prefill before decode must go on.
        kept, asked: deadlines kept by it, of how many.
        drain: started forwards must end first, then a hybrid step is better.
    """

    kind: Kind
    split: Split
    speed: float
    chunk: int = 0
    seconds: float = 0.0
    kept: int = 0
    asked: int = 0
    drain: bool = False


class Demand(NamedTuple):
    """What is asked of the device.

    Attributes:
        tokens: [running] when each reader's next token is due, ascending.
        tpot: the tightest TPOT objective among them.
        work: [prefills] seconds of each on the whole device, alone, in the order they will be served.
        first: [prefills] when each one's first token is due.
        weight: [prefills] requests each stands for.
        ttft: the TTFT objective that lateness is measured by.
        rate: seconds of prefill work (whole device, alone) in one prompt token.
        group: seconds that the smallest piece of prefill takes on the whole device.
        starved: prefill must get on now.
    """

    tokens: list[float]
    tpot: float
    work: list[float]
    first: list[float]
    weight: list[int]
    ttft: float
    rate: float
    group: float
    starved: bool


_Way = tuple[float, "Kind", Split, float, int, int]
"""A way to go on, judged: score, kind, split, speed, chunk, deadlines kept. Of two ways the better one is greater."""


class _Firsts:
    """How many first tokens are in time, and how late the others are, for any pace of prefill from one moment on.

    Each prefill has a pace below which it is late; sorted by it, the late ones are a tail whose sums are known.
    """

    __slots__ = ("_needs", "_slack", "_weight", "_work", "total")

    def __init__(self, demand: Demand, start: float) -> None:
        line = []
        done = 0.0
        for work, first, weight in zip(demand.work, demand.first, demand.weight, strict=True):
            done += work
            slack = first - start
            line.append((done / slack if slack > 0.0 else _NEVER, weight, weight * done, weight * slack))
        line.sort(reverse=True)
        self._needs, self._weight, self._work, self._slack = [], [0], [0.0], [0.0]
        for need, weight, work, slack in line:
            self._needs.append(-need)
            self._weight.append(self._weight[-1] + weight)
            self._work.append(self._work[-1] + work)
            self._slack.append(self._slack[-1] + slack)
        self.total = self._weight[-1]

    def at(self, pace: float) -> tuple[int, float]:
        """Requests in time, and seconds that the others are late, summed."""
        late = bisect_left(self._needs, -pace)
        return self.total - self._weight[late], self._work[late] / pace - self._slack[late]


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
        "_whole",
        "asked",
    )

    def __init__(self, snapshot: Snapshot, demand: Demand, alone: float, last: Choice) -> None:
        self._begin = max(snapshot.now, snapshot.decode_lane.busy_until)
        begin = max(snapshot.now, snapshot.prefill_lane.busy_until)
        self._begin_whole = max(self._begin, begin)
        self._demand, self._alone, self._held, self._last = demand, alone, snapshot.split, last
        self._earliest = demand.tokens[0]
        self._firsts = _Firsts(demand, begin)
        self._whole = _Firsts(demand, self._begin_whole) if begin < self._begin_whole else self._firsts
        self.asked = len(demand.tokens) + self._firsts.total

    @property
    def spare(self) -> float:
        """Seconds until the first reader's token is due, from when the whole device is free."""
        return self._earliest - self._begin_whole

    def way(
        self, kind: Kind, split: Split, mean: float, upper: float, speed: float, sure: float, chunk: int = 0
    ) -> _Way:
        """Score one way.

        Args:
            mean, upper: seconds until the step has ended.
            speed, sure: pace of prefill meanwhile, 1 = alone on the whole device.
        """
        demand, held, last = self._demand, self._held, self._last
        proper = kind is _SPLIT
        end = upper + (self._begin if proper and split.decode <= held.decode else self._begin_whole) - 1e-9
        kept, late = (self._firsts if proper and split.prefill <= held.prefill else self._whole).at(sure)
        kept += len(demand.tokens)
        if end > self._earliest:
            kept -= bisect_left(demand.tokens, end)
        score = kept + GAIN * (self._alone / mean + speed) - LATENESS * min(1.0, late / (demand.ttft * self.asked))
        if upper <= demand.tpot:
            score += KEEP_UP
        if kind is last.kind and (not proper or split == last.split):
            score += STAY
        return score, kind, split, speed, chunk, kept


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
    units, spare = snapshot.units, judge.spare
    burst = spare - alone.upper
    whole = Split(0, units)
    ways = [_best_split(judge, splits, predictor, options, demand, last)] if splits else []
    if not demand.starved:
        ways.append(judge.way(_DECODE, whole, alone.mean, alone.upper, 0.0, 1e-9))
    if burst > demand.group:
        speed = burst / (burst + alone.mean)
        ways.append(judge.way(_PREFILL, Split(units, 0), alone.mean + burst, alone.upper + burst, speed, speed))
    hybrids = []
    for limit in {min(demand.tpot, spare), spare}:
        chunk, mean, upper = options.hybrid(predictor, limit)
        done = chunk * demand.rate
        hybrids.append(judge.way(_HYBRID, whole, mean, upper, done / mean, done / upper, chunk))
    hybrid = max(hybrids)
    best = max(ways) if ways else hybrid
    drain = False
    if hybrid[0] > best[0]:
        drain = bool(snapshot.forwards) and bool(ways)
        best = best if drain else hybrid
    _, kind, split, speed, chunk, kept = best
    return Choice(kind, split, speed, chunk, burst, kept, judge.asked, drain)


def _best_split(
    judge: _Judge, splits: tuple[Split, ...], predictor: Predictor, options: Options, demand: Demand, last: Choice
) -> _Way:
    """The best proper split: from the last one uphill while it keeps every deadline, else a grid and its neighbours."""
    seen: dict[int, _Way] = {}

    def look(place: int) -> float:
        way = seen.get(place)
        if way is None:
            mean, upper, speed, sure = options.beside(predictor, place)
            way = seen[place] = judge.way(_SPLIT, splits[place], mean, upper, speed, sure)
        return way[0]

    count = len(splits)
    stride = max(1, (count - 1) // _COARSE)
    best = splits.index(last.split) if last.kind is _SPLIT and last.split in splits else -1
    if best >= 0 and look(best) > judge.asked + KEEP_UP:
        stride = 1
    else:
        best = max({*range(0, count, stride), count - 1}, key=look)
        stride //= 2
    while stride:
        best = max((best, *(place for place in (best - stride, best + stride) if 0 <= place < count)), key=look)
        stride //= 2
    return seen[best]


_NEVER = 1e12
"""A pace that no prefill reaches."""
_SPLIT, _HYBRID, _DECODE, _PREFILL = Kind
"""Plain names: looking a member up in its enumeration costs more than the comparison it is for."""
