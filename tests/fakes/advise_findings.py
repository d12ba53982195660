"""Findings made by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from smpart.bench.advise.facts import Facts
from smpart.bench.advise.findings import Findings
from smpart.bench.advise.question import Question
from smpart.bench.advise.table import Row, Table
from smpart.bench.source import TraceOptions
from smpart.bench.typical import Typical
from smpart.partition import Split
from smpart.partition.gpus import GPUS
from smpart.scheduler.slo import SLO

NAMES = {
    "chunked": "chunked:512",
    "chunked+slack": "chunked+slack",
    "smpart": "smpart",
    "static": "static:96/36",
    "pdmux": "pdmux:112/20@1",
}
TABLE = Table((Row(Split(112, 20), 1), Row(Split(96, 36), 9)), 30)


def facts(**changed: Any) -> Facts:
    usual: dict[str, Any] = {
        "policy": "chunked:512",
        "rate": 4.0,
        "met": 0.6,
        "misses": {"TTFT": 0.4, "TPOT": 0.01, "ITL": 0.0, "service": 0.0},
        "batch": 14.2,
        "hybrid_ms": 21.0,
        "plain_ms": 8.0,
        "hybrid_share": 0.7,
        "bubble": {"prefill": 0.0, "decode": 0.0},
    }
    return Facts(**{**usual, **changed})


def held(
    chunked: Sequence[float], smpart: Mapping[float, Sequence[float]], order: Sequence[float] | None = None
) -> dict[float, dict[str, tuple[float, ...]]]:
    """Capacities where the fixed split and the table hold as much as chunked."""
    same = tuple(chunked)
    alone = {"chunked": same, "chunked+slack": tuple(order or same), "static": same, "pdmux": same}
    return {contention: {**alone, "smpart": tuple(rates)} for contention, rates in smpart.items()}


def findings(gpu: str = "h100", **changed: Any) -> Findings:
    slo, source = SLO(200, 20), TraceOptions("synth:chat", 100)
    usual: dict[str, Any] = {
        "question": Question("llama-3.1-8b", gpu, source, slo, contentions=(1.0, 1.3)),
        "units": GPUS[gpu].sms,
        "capability": GPUS[gpu].capability,
        "layers": 32,
        "typical": Typical(prompt=500, fresh=500, answer=150, context=600),
        "hopeless": 0.0,
        "table": TABLE,
        "known_for": 1.3,
        "prefill_s": 0.020,
        "names": NAMES,
        "held": held([2.0], {1.0: [4.0], 1.3: [3.0]}),
        "one_lane": facts(),
        "two_lanes": facts(policy="smpart"),
        "runs": 99,
    }
    return Findings(**{**usual, **changed})
