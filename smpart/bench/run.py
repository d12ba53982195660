"""One policy on one load, once: the replay, and the record of it that goes to JSON."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from smpart.bench.load import Load
from smpart.bench.metrics import Summary, summarise
from smpart.bench.prospect import Prospect
from smpart.bench.replay import Job, Replay, Status, replay
from smpart.engine.deployment import Deployment
from smpart.scheduler.slo import SLO


@dataclass(frozen=True, slots=True)
class Run:
    """What one replay gave."""

    policy: str
    seed: int
    slo: SLO
    record: Summary
    replay: Replay


def run(
    deployment: Deployment,
    policy: str,
    slo: SLO,
    load: Load,
    jobs: Sequence[Job],
    *,
    seed: int,
    spec: str | None = None,
    watch: Callable[[Status], None] | None = None,
    least: float = 0.0,
) -> Run:
    """Replay `jobs` (the prompts of `load`) under one policy on a fresh core.

    Args:
        policy: its name in the record.
        spec: the policy with its argument, where that is not part of the name.
        least: the replay is cut short when it can no longer reach this attainment.
    """
    core = deployment.core(spec or policy, slo, seed=seed)
    result = replay(core, jobs, slo, watch, Prospect(jobs, slo, least) if least else None)
    record: Summary = {
        "policy": policy,
        "spec": spec or policy,
        "backend": deployment.backend,
        "model": deployment.name,
        "trace": load.name,
        "rate": float(f"{load.rate:.6g}") if math.isfinite(load.rate) else None,
        "seed": seed,
        "slo": {"ttft_ms": slo.ttft_ms, "tpot_ms": slo.tpot_ms, "itl_ms": slo.itl_ms},
        **summarise(result, slo, deployment.gpus * core.devices),
        "capacity_rps": None,
        "capacity_per_gpu_rps": None,
        "virtual": deployment.virtual,
        "drifted": core.drifted,
    }
    return Run(policy, seed, slo, record, result)
