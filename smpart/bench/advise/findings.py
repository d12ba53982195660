"""Everything that was found, before it is put into words or files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from smpart.bench.advise.contenders import CHUNKED, ONE_LANE, SMPART
from smpart.bench.advise.facts import Facts
from smpart.bench.advise.gain import SHARE, SPLIT, Capacities, Gain, gain, verdict
from smpart.bench.advise.question import Question
from smpart.bench.advise.table import Table
from smpart.bench.typical import Typical
from smpart.errors import UsageError


@dataclass(frozen=True, slots=True)
class Findings:
    """Attributes:
    units: SMs of the GPU.
    capability: its CUDA compute capability.
    layers: of the model.
    hopeless: share of the prompts that miss TTFT even alone on the idle GPU.
    known_for: contention constant at which the table holds.
    prefill_s: a typical prefill on the table's first split beside its decode step; None: there is no table.
    names: the policy behind each contender.
    held: capacities by contention constant, contender and seed; 0: none, or less than a fifth of chunked's.
    one_lane, two_lanes: the best chunked prefill and smpart at one rate that is too high for chunked.
    runs: replays that the search took.
    """

    question: Question
    units: int
    capability: tuple[int, int]
    layers: int
    typical: Typical
    hopeless: float
    table: Table
    known_for: float
    prefill_s: float | None
    names: Mapping[str, str]
    held: Mapping[float, Capacities]
    one_lane: Facts
    two_lanes: Facts
    runs: int

    def check(self) -> None:
        """Raise `UsageError` if no contender held any rate."""
        if not any(any(rates) for by_name in self.held.values() for rates in by_name.values()):
            slo = self.question.slo
            raise UsageError(
                f"no policy holds ttft={slo.ttft_ms:g},tpot={slo.tpot_ms:g},itl={slo.itl_ms:g} ms for "
                f"{self.question.target:.0%} of the requests at any rate that was tried"
            )

    @property
    def base(self) -> tuple[float, ...]:
        """Capacity of chunked prefill, one a seed: it has one lane, and no neighbour whose cost could be swept."""
        return tuple(self.held[self.question.worst][CHUNKED])

    @property
    def verdict(self) -> str:
        """`SPLIT` if smpart wins over every way to use one lane; else `SHARE`."""
        alone = self.held[self.question.worst]
        won = all(verdict(self.held, SMPART, alone[name]) == SPLIT for name in ONE_LANE if name in alone)
        return SPLIT if won else SHARE

    @property
    def ordered(self) -> bool:
        """Whether smpart wins over chunked prefill, but one lane with the same order and deadlines does as well."""
        return not self.split and verdict(self.held, SMPART, self.base) == SPLIT

    @property
    def split(self) -> bool:
        """Whether a split is advised."""
        return self.verdict == SPLIT

    def gain(self, contender: str = SMPART) -> Gain | None:
        """Its capacity over that of chunked prefill; None: chunked holds no rate, or there is no such contender."""
        return gain(self.held, contender, self.base) if contender in self.names else None

    def spans(self, contender: str) -> tuple[float, float]:
        """Lowest and highest capacity, requests a second."""
        rates = [rate for by_name in self.held.values() for rate in by_name.get(contender, ())]
        return min(rates), max(rates)
