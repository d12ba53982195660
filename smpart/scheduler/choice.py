"""Which way to run the next decode step and the prefills beside it: the heart of the controller, as arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

import numpy as np

from smpart.partition import Split
from smpart.scheduler.costs import CHUNKS, Floats, Options, between
from smpart.scheduler.snapshot import Snapshot

KEEP_UP = 0.5
"""What being able to go on like this is worth, in deadlines kept: breaks ties only."""
GAIN = 0.15
"""What getting twice as much work done is worth, likewise."""
STAY = 0.01
"""What not moving is worth, likewise."""


class Kind(StrEnum):
    """A way to go on."""

    SPLIT = "split"
    HYBRID = "hybrid"
    DECODE = "decode alone"
    PREFILL = "prefill within slack"


@dataclass(frozen=True, slots=True)
class Choice:
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


class Sides(NamedTuple):
    """The proper splits, and the units each of `choose`'s columns needs: the last four want the whole device.

    >>> Sides.of((Split(0, 4), Split(1, 3), Split(4, 0))).decode.tolist()
    [3.0, 4.0, 4.0, 4.0, 4.0]
    """

    splits: tuple[Split, ...]
    prefill: Floats
    decode: Floats

    @classmethod
    def of(cls, splits: tuple[Split, ...]) -> Sides:
        """From every split there is."""
        proper = tuple(split for split in splits if not split.exclusive)
        whole = [float(splits[0].total)] * 4
        return cls(
            proper,
            np.array([*(float(split.prefill) for split in proper), *whole]),
            np.array([*(float(split.decode) for split in proper), *whole]),
        )


class Demand(NamedTuple):
    """What is asked of the device.

    Attributes:
        tokens: [running] when each reader's next token is due, ascending.
        tpot: the tightest TPOT objective among them.
        work: [prefills] seconds of each on the whole device, alone, in the order they will be served.
        first: [prefills] when each one's first token is due.
        weight: [prefills] requests each stands for.
        rate: seconds of prefill work (whole device, alone) in one prompt token.
        group: seconds that the smallest piece of prefill takes on the whole device.
        starved: prefill must get on now.
    """

    tokens: Floats
    tpot: float
    work: Floats
    first: Floats
    weight: Floats
    rate: float
    group: float
    starved: bool


def choose(snapshot: Snapshot, sides: Sides, options: Options, demand: Demand, last: Choice) -> Choice:
    """The best way for decode rows and prefills that are both there.

    Args:
        sides: the proper splits, in the order of `options`.
        last: what was chosen before; it is kept unless another way is clearly better.
    """
    now, units, splits = snapshot.now, snapshot.units, sides.splits
    count = len(splits)
    alone = options.alone
    begin = max(now, snapshot.decode_lane.busy_until)
    begin_prefill = max(now, snapshot.prefill_lane.busy_until)
    begin_whole = max(begin, begin_prefill)
    spare = float(demand.tokens[0]) - begin_whole
    burst = spare - alone.upper
    can_burst = burst > demand.group
    tokens = demand.tokens

    # columns: every split, hybrid that can be kept up, hybrid within slack, decode alone, prefill within slack
    upper, mean = options.step_upper.copy(), options.step_mean.copy()
    speed, sure = options.speed_mean.copy(), options.speed_sure.copy()
    chunks = []
    for column, limit in ((count, min(demand.tpot, spare)), (count + 1, spare)):
        chunk = int(between(limit, options.chunk_upper, CHUNKS))
        upper[column] = between(chunk, CHUNKS, options.chunk_upper)
        mean[column] = between(chunk, CHUNKS, options.chunk_mean)
        speed[column] = chunk * demand.rate / mean[column]
        sure[column] = chunk * demand.rate / upper[column]
        chunks.append(chunk)
    pause = burst if can_burst else 0.0
    upper[count + 2 :] = alone.upper, alone.upper + pause
    mean[count + 2 :] = alone.mean, alone.mean + pause
    speed[count + 3] = pause / (pause + alone.mean)
    sure[count + 2 :] = 1e-9, max(1e-9, speed[count + 3])
    held = snapshot.split
    ends = upper + np.where(sides.decode <= held.decode, begin, begin_whole)
    starts = np.where(sides.prefill <= held.prefill, begin_prefill, begin_whole)

    kept: Floats = (len(tokens) - tokens.searchsorted(ends - 1e-9)).astype(np.float64)
    if demand.work.size:
        finish = starts[:, None] + demand.work.cumsum() / sure[:, None]
        kept += (finish <= demand.first) @ demand.weight
    score = kept + KEEP_UP * (upper <= demand.tpot) + GAIN * (alone.mean / mean + speed)
    if not can_burst:
        score[count + 3] = -np.inf
    if demand.starved:
        score[count + 2] = -np.inf
    score[_place(last, splits)] += STAY

    best = int(score.argmax())
    drain = False
    if snapshot.forwards and count <= best < count + 2:
        drain = True
        score[count : count + 2] = -np.inf
        best = int(score.argmax())
    asked = len(demand.tokens) + int(demand.weight.sum())
    kind, split, chunk = _column(best, splits, units, chunks)
    return Choice(kind, split, float(speed[best]), chunk, burst, int(kept[best]), asked, drain)


def _column(best: int, splits: tuple[Split, ...], units: int, chunks: list[int]) -> tuple[Kind, Split, int]:
    count = len(splits)
    if best < count:
        return Kind.SPLIT, splits[best], 0
    if best < count + 2:
        return Kind.HYBRID, Split(0, units), chunks[best - count]
    return (Kind.DECODE, Split(0, units), 0) if best == count + 2 else (Kind.PREFILL, Split(units, 0), 0)


def _place(choice: Choice, splits: tuple[Split, ...]) -> int:
    """Column of a former choice."""
    if choice.kind is Kind.SPLIT and choice.split in splits:
        return splits.index(choice.split)
    return len(splits) + {Kind.SPLIT: 2, Kind.HYBRID: 0, Kind.DECODE: 2, Kind.PREFILL: 3}[choice.kind]
