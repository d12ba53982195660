"""Objectives that no policy and no rate can hold: found before anything is searched."""

from __future__ import annotations

from smpart.bench.load import Load
from smpart.bench.typical import Typical, fresh_tokens
from smpart.partition import Shape
from smpart.partition.sim import Cost
from smpart.predictor.estimate import NOTHING
from smpart.scheduler.slo import SLO


def out_of_reach(load: Load, typical: Typical, slo: SLO, late: float, cost: Cost, units: int) -> str | None:
    """Why not even requests that come one by one, each with the whole idle device, hold the objectives; None: they do.

    Args:
        late: share of the requests that need not.
    """
    if any(arrival.output_tokens > 1 for arrival in load.arrivals):
        step = 1e3 * cost(typical.step(1), units, NOTHING, 0)
        for name, limit in (("tpot", slo.tpot_ms), ("itl", slo.itl_ms)):
            if step > limit:
                return f"a decode step of one sequence alone takes {step:.3g} ms, {name} is {limit:g} ms"
    if (lost := too_long(load, slo, cost, units)) > late + 1e-9:
        return f"alone on the idle device {lost:.0%} of the prompts take longer than ttft, {slo.ttft_ms:g} ms"
    return None


def too_long(load: Load, slo: SLO, cost: Cost, units: int) -> float:
    """Share of the prompts that miss TTFT on the idle device."""
    firsts = [
        1e3 * cost(Shape.prefill([(new, arrival.prompt_tokens - new)]), units, NOTHING, 0)
        for arrival, new in zip(load.arrivals, fresh_tokens(load.arrivals), strict=True)
    ]
    return sum(first > slo.ttft_ms for first in firsts) / len(firsts)
