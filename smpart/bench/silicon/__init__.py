"""The simulated GPUs against silicon: a real run replayed in virtual time, and measured end-to-end points."""

from smpart.bench.silicon.hosts import AT_ODDS, fit_hosts
from smpart.bench.silicon.loop import busy, closed_loop, predict
from smpart.bench.silicon.points import EndToEnd, end_to_end
from smpart.bench.silicon.rival import Estimate, estimate
from smpart.bench.silicon.run import (
    FITTED_ON,
    WARM_UP_S,
    Latency,
    Run,
    fit_run,
    real_run,
    replay_real_run,
    summary,
)

__all__ = [
    "AT_ODDS",
    "FITTED_ON",
    "WARM_UP_S",
    "EndToEnd",
    "Estimate",
    "Latency",
    "Run",
    "busy",
    "closed_loop",
    "end_to_end",
    "estimate",
    "fit_hosts",
    "fit_run",
    "predict",
    "real_run",
    "replay_real_run",
    "summary",
]
