"""A real vLLM run on an RTX 4090, replayed in virtual time."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from smpart.bench.replay import Job, replay
from smpart.bench.silicon.admission import Reserving
from smpart.bench.silicon.core import PATIENT, virtual_core
from smpart.runtime.sampling import SamplingParams
from smpart.scheduler.registry import Setup
from smpart.sim import DIMENSIONS, Host, SiliconCost
from smpart.sim.published import data_file
from smpart.sim.rtx4090 import FOLDER, TIMED

Floats = NDArray[np.float64]

FITTED_ON = 100
"""Requests of the real run that constants may be fitted on; the others are predicted."""

WARM_UP_S = 0.3665
"""How long the first launch of the real run held the engine (compilation, caches). With the step of
`smpart.sim.host.HOSTS` of vLLM the only constant of this run: `fit_run` gives both."""

_BUDGET = 2048
_SEQUENCES = 256
_BLOCKS = 2587
"""Limits that the run was served under. Of the 2588 blocks vLLM keeps one empty; the memory use that the run recorded,
in hundredths of a percent, is in whole blocks out of 2587, and out of no other number near it."""

_SOON = 6
"""Requests whose first tokens come while the first launch still matters."""

_BEHIND = 2
"""Times `FITTED_ON` requests that have to be replayed for those to see the neighbours they had: served in order of
arrival, later ones only wait."""


class Latency(NamedTuple):
    """Seconds of each request."""

    ttft: Floats
    tpot: Floats


class Run(NamedTuple):
    """The real run, in order of arrival: arrival seconds from the first one, tokens, and what was measured."""

    arrivals: Floats
    prompts: list[int]
    outputs: list[int]
    measured: Latency

    def first(self, count: int) -> Run:
        """Its first requests."""
        measured = Latency(*(part[:count] for part in self.measured))
        return Run(self.arrivals[:count], self.prompts[:count], self.outputs[:count], measured)


class Fitted(NamedTuple):
    """What the first requests of the real run say, in seconds."""

    warm_up: float
    step: float


def real_run() -> Run:
    """300 requests that vLLM 0.19 served on an RTX 4090. Raises `UsageError` where the file is absent.

    The engine's clock and the clients' differ by a constant: the least lag from a client's send to the engine's queue
    counts as none.
    """
    with data_file(f"{FOLDER}/vllm_requests.jsonl").open(encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    sent, queued, first, last = (
        np.array([row[name] for row in rows])
        for name in ("arrival_time", "queued_ts", "first_token_ts", "last_token_ts")
    )
    outputs = [int(row["output_toks"]) for row in rows]
    tpot = (last - first) / (np.array(outputs) - 1)
    measured = Latency(first - (sent + (queued - sent).min()), tpot)
    return Run(sent - sent[0], [int(row["input_toks"]) for row in rows], outputs, measured)


def replay_real_run(run: Run, host: Host | None = None, warm_up_s: float = WARM_UP_S) -> Latency:
    """The same requests under vLLM's rule and limits, in virtual time.

    vLLM 0.19 plans a step while the one before it runs; the times at which the run's requests were queued and
    scheduled show it.

    Args:
        host: vLLM's overheads; None: as `smpart.sim` has them.
        warm_up_s: how long the first launch held the engine: whoever came meanwhile was seen when it was over.
    """
    model = DIMENSIONS[TIMED]
    cost = SiliconCost(model, "rtx4090", host=host)
    policy = Reserving(Setup(str(_BUDGET)))
    core = virtual_core(model.shape, "rtx4090", cost, policy, blocks=_BLOCKS, sequences=_SEQUENCES, ahead=True)
    seen = np.maximum(run.arrivals, warm_up_s).tolist()
    jobs = [
        Job(due, range(i << 20, (i << 20) + prompt), SamplingParams(max_tokens=output, ignore_eos=True))
        for i, (due, prompt, output) in enumerate(zip(seen, run.prompts, run.outputs, strict=True))
    ]
    served = replay(core, jobs, PATIENT).served
    return latency([(due, s.times_s) for due, s in zip(run.arrivals.tolist(), served, strict=True)])


def fit_run(run: Run) -> Fitted:
    """The constants of the run, from its first `FITTED_ON` requests alone.

    The warm-up makes the first request's first token come when it came. The seconds of a step are the least squares of
    the relative errors of all figures of `summary`, which are nearly linear in them.
    """
    soon = run.first(_SOON)
    warm_up = 0.0
    for _ in range(4):
        late = replay_real_run(soon, Host(step=0.0), warm_up).ttft[0] - run.measured.ttft[0]
        warm_up = max(0.0, warm_up - float(late))
    known, which = run.first(_BEHIND * FITTED_ON), slice(0, FITTED_ON)
    wanted = np.array(list(summary(run.measured, which).values()))
    trial = 0.5e-3
    errors = [
        np.array(list(summary(replay_real_run(known, Host(step=step), warm_up), which).values())) / wanted - 1
        for step in (0.0, trial)
    ]
    slope = (errors[1] - errors[0]) / trial
    return Fitted(warm_up, max(0.0, float(-(slope @ errors[0]) / (slope @ slope))))


def summary(latency: Latency, which: slice) -> dict[str, float]:
    """Seconds: mean, median and 95th percentile of TTFT and TPOT."""
    kinds: dict[str, Callable[[Floats], np.floating]] = {
        "mean": np.mean,
        "p50": lambda x: np.percentile(x, 50),
        "p95": lambda x: np.percentile(x, 95),
    }
    parts = {"TTFT": latency.ttft[which], "TPOT": latency.tpot[which]}
    return {f"{part} {kind}": float(of(values)) for part, values in parts.items() for kind, of in kinds.items()}


def latency(served: Sequence[tuple[float, Sequence[float]]]) -> Latency:
    """Of requests that all got at least two tokens: when each was due and when its tokens came."""
    ttft = [times[0] - due for due, times in served]
    tpot = [(times[-1] - times[0]) / max(1, len(times) - 1) for _, times in served]
    return Latency(np.array(ttft), np.array(tpot))
