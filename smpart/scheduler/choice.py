"""Which way to run the next decode step and the prefills beside it: the heart of the controller, as arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

import numpy as np

from smpart.partition import Split
from smpart.scheduler.costs import CHUNKS, Floats, Options
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


def choose(snapshot: Snapshot, splits: tuple[Split, ...], options: Options, demand: Demand, last: Choice) -> Choice:
    """The best way for decode rows and prefills that are both there.

    Args:
        splits: the proper ones, in the order of `options`.
        last: what was chosen before; it is kept unless another way is clearly better.
    """
    now, units, count = snapshot.now, snapshot.units, len(splits)
    alone = options.alone
    begin = max(now, snapshot.decode_lane.busy_until)
    begin_prefill = max(now, snapshot.prefill_lane.busy_until)
    begin_whole = max(begin, begin_prefill)
    spare = float(demand.tokens[0]) - begin_whole
    lasting = min(demand.tpot, spare)
    chunks = np.interp((lasting, spare), options.chunk_upper, CHUNKS)
    hybrid_upper = np.interp(chunks, CHUNKS, options.chunk_upper)
    hybrid_mean = np.interp(chunks, CHUNKS, options.chunk_mean)
    burst = spare - alone.upper

    # columns: every split, hybrid that can be kept up, hybrid within slack, decode alone, prefill within slack
    upper = np.concatenate((options.step_upper, hybrid_upper, (alone.upper, alone.upper + max(0.0, burst))))
    mean = np.concatenate((options.step_mean, hybrid_mean, (alone.mean, alone.mean + max(0.0, burst))))
    hybrid_speed = chunks * demand.rate / hybrid_mean
    burst_speed = burst / (burst + alone.mean) if burst > demand.group else 0.0
    speed = np.concatenate((options.speed_mean, hybrid_speed, (0.0, burst_speed)))
    sure = np.concatenate((options.speed_sure, chunks * demand.rate / hybrid_upper, (1e-9, max(burst_speed, 1e-9))))
    starts = np.full(count + 4, begin_whole)
    starts_prefill = np.full(count + 4, max(begin, begin_prefill))
    held = snapshot.split
    for place, split in enumerate(splits):
        if split.decode <= held.decode:
            starts[place] = begin
        if split.prefill <= held.prefill:
            starts_prefill[place] = begin_prefill

    ends = starts + upper
    readers = len(demand.tokens) - np.searchsorted(demand.tokens, ends - 1e-9)
    finish = starts_prefill[:, None] + np.cumsum(demand.work)[None, :] / sure[:, None]
    kept: Floats = readers + (finish <= demand.first[None, :]) @ demand.weight
    score = kept + KEEP_UP * (upper <= demand.tpot) + GAIN * (alone.mean / mean + speed)
    if burst <= demand.group:
        score[count + 3] = -np.inf
    if demand.starved:
        score[count + 2] = -np.inf
    score[_place(last, splits)] += STAY

    best = int(np.argmax(score))
    drain = False
    if snapshot.forwards and count <= best < count + 2:
        drain = True
        score[count : count + 2] = -np.inf
        best = int(np.argmax(score))
    asked = len(demand.tokens) + int(demand.weight.sum())
    kind, split, chunk = _column(best, splits, units, chunks)
    return Choice(kind, split, float(speed[best]), chunk, burst, int(kept[best]), asked, drain)


def _column(best: int, splits: tuple[Split, ...], units: int, chunks: Floats) -> tuple[Kind, Split, int]:
    count = len(splits)
    if best < count:
        return Kind.SPLIT, splits[best], 0
    if best < count + 2:
        return Kind.HYBRID, Split(0, units), int(chunks[best - count])
    return (Kind.DECODE, Split(0, units), 0) if best == count + 2 else (Kind.PREFILL, Split(units, 0), 0)


def _place(choice: Choice, splits: tuple[Split, ...]) -> int:
    """Column of a former choice."""
    if choice.kind is Kind.SPLIT and choice.split in splits:
        return splits.index(choice.split)
    return len(splits) + {Kind.SPLIT: 2, Kind.HYBRID: 0, Kind.DECODE: 2, Kind.PREFILL: 3}[choice.kind]
