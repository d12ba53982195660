"""How kernels slow down on fewer SMs, and beside a neighbour that uses the same memory.

The curves are fitted to the published ones of MuxWise's authors (``ykcombat/sglang``, branch ``slo_scheduler``: latency
of whole forwards against SMs on A100 and H800). Nothing here comes from a predictor.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from smpart.partition.gpus import GPUS
from smpart.sim.gpus import PEAKS
from smpart.sim.kernels import Part
from smpart.sim.sharing import demand, held

BESIDE = 1.009
"""What any neighbour costs, however little memory it touches (power, instruction issue, caches): published pairs of
co-running kernels went as low as +0.9 % beyond their share of the SMs."""

INTERFERENCE = 0.15
"""Bandwidth lost, beyond fair sharing, at full traffic of the neighbour (L2 misses, row conflicts). An assumption: with
it pairs lie between the least published slowdown (`BESIDE`) and the worst, 20 % on A100 and 30 % on H100 (MuxWise,
arXiv 2504.14489), near the least. `contention` of `SiliconCost` moves them to the worst and beyond."""

REACHED = 0.92
"""Share of peak bandwidth beyond which two lanes together are slowed down: the best that streaming kernels reach."""


@dataclass(frozen=True, slots=True)
class Response:
    """How one GPU's kernels answer to fewer SMs.

    Attributes:
        arithmetic: seconds of arithmetic grow as ``1 + arithmetic * (all / some - 1)``. Under 1: with all SMs busy the
            clock drops, and tails and gaps do not shrink.
        knee: share of the SMs in which bandwidth saturates exponentially.
    """

    arithmetic: float
    knee: float


RESPONSES = {
    "a100": Response(arithmetic=0.66, knee=0.25),
    "h100": Response(arithmetic=0.45, knee=0.19),
    "h200": Response(arithmetic=0.45, knee=0.19),
    "rtx4090": Response(arithmetic=0.66, knee=0.19),
}
"""Set by hand near the least squares of the published median curves from 32 SMs on; how far each is off is told in
``docs/simulator.md``, and a test holds it. A100 follows the published A100 (its larger model), both Hopper GPUs H800.
Of the RTX 4090 nothing is published: it takes the slower clock's arithmetic and the larger L2's knee."""


class Load(NamedTuple):
    """Kernels of a forward on some SMs without a neighbour.

    Attributes:
        fixed: seconds that a neighbour's traffic does not stretch.
        memory: seconds that it does.
        moved: seconds that their bytes alone would take, at the bandwidth that both lanes share.
    """

    fixed: float
    memory: float
    moved: float

    @property
    def seconds(self) -> float:
        """Of all kernels."""
        return self.fixed + self.memory

    def beside(self, other: Load, crowding: float = 1.0) -> float:
        """Seconds beside another forward that runs all the while.

        Args:
            crowding: times as long as SMs take that both use (`smpart.sim.sharing`).
        """
        fixed, memory, moved = self
        beside_fixed, beside_memory, beside_moved = other
        theirs = beside_moved / (beside_fixed + beside_memory)
        asked = moved / (fixed + memory) + theirs
        slower = (asked if asked > crowding else crowding) * (1.0 + INTERFERENCE * theirs)
        return BESIDE * (fixed * crowding + memory * slower)


class Scaling:
    """Puts kernels that were timed on a whole GPU onto some of its SMs.

    Args:
        gpu: a name of `RESPONSES`.
    """

    def __init__(self, gpu: str) -> None:
        self._units = GPUS[gpu].sms
        self._flops, self._bandwidth = PEAKS[gpu].flops, PEAKS[gpu].bandwidth
        self._response = RESPONSES[gpu]
        self._held = held(self._response.knee)
        self._slowdowns = cache(self._slowdowns_on)
        self._tail = cache(self._tail_on)

    def load(self, parts: Iterable[Part], units: int) -> Load:
        """The kernels on `units` SMs, at least one."""
        fixed = memory = moved = 0.0
        for part in parts:
            load = self.one(part, units)
            fixed, memory, moved = fixed + load[0], memory + load[1], moved + load[2]
        return Load(fixed, memory, moved)

    def one(self, part: Part, units: int) -> Load:
        """Kernels of one kind on `units` SMs, at least one."""
        seconds, flops, traffic, tiles = part
        compute, streaming = flops / self._flops, traffic / self._bandwidth
        both = compute + streaming
        if both == 0.0:  # waits on other GPUs: SMs do not matter
            return Load(seconds, 0.0, 0.0)
        arithmetic, memory = self._slowdowns(units)
        arithmetic *= self._tail(tiles, units)
        seconds /= both
        return Load(
            seconds * compute * (arithmetic if arithmetic > 1.0 else 1.0),
            seconds * streaming * memory,
            streaming / REACHED,
        )

    def demand(self, load: Load, units: int) -> float:
        """The part of all SMs' time that a load takes on `units` of them, alone."""
        return demand(load.fixed / load.seconds, load.memory / load.seconds, units / self._units, self._held)

    def _slowdowns_on(self, units: int) -> tuple[float, float]:
        share = units / self._units
        response = self._response
        arithmetic = 1.0 + response.arithmetic * (1.0 / share - 1.0)
        return arithmetic, math.expm1(-1.0 / response.knee) / math.expm1(-share / response.knee)

    def _tail_on(self, tiles: float, units: int) -> float:
        """What the last, partly filled wave costs on `units` SMs against all of them."""
        if tiles <= 0.0 or units >= self._units:
            return 1.0
        return _waves(tiles, units) / _waves(tiles, self._units)


def _waves(tiles: float, units: int) -> float:
    """Rounds in which some SMs finish equal tiles, in full rounds' worth of work."""
    rounds = tiles / units
    return math.ceil(rounds) / rounds
