"""How fast a deployment is: a few measured steps, from which objectives and loads that fit the machine follow."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

import numpy as np

from smpart.bench.load import Load
from smpart.bench.metrics import itl_ms
from smpart.bench.replay import Core, Job, Replay, replay
from smpart.engine.deployment import Deployment
from smpart.partition import Split
from smpart.runtime.sampling import SamplingParams
from smpart.scheduler.slo import SLO

_PATIENT = SLO(ttft_ms=1e9, tpot_ms=1e9)
_STEPS = 6
_PROMPT = 16


@dataclass(frozen=True, slots=True)
class Speed:
    """One lane of an even split, measured alone.

    Attributes:
        prefill_tok_s: prompt tokens per second.
        step_s: seconds of a decode step of no sequence, extrapolated: the part that does not grow with the batch.
        row_s: seconds that each sequence adds to a step.
        lanes: the policy that gave the lane its units, for example ``static:1/1``.
    """

    prefill_tok_s: float
    step_s: float
    row_s: float
    lanes: str

    def step(self, batch: float) -> float:
        """Seconds of one decode step of `batch` sequences."""
        return self.step_s + self.row_s * batch

    def batch_at(self, tokens_per_s: float) -> float:
        """Mean batch at which a lane decodes so many tokens per second (Little's law); infinite if it cannot.

        >>> Speed(1000.0, 0.1, 0.01, "").batch_at(50.0)
        10.0
        """
        left = 1.0 - tokens_per_s * self.row_s
        return tokens_per_s * self.step_s / left if left > 0 else math.inf

    def rate_for(self, prompts: Sequence[int], outputs: Sequence[int], load: float, most_batch: int = 32) -> float:
        """Requests per second that use `load` of the prefill lane, or of the decode lane at `most_batch`."""
        prefill = self.prefill_tok_s / fmean(prompts)
        decode = most_batch / self.step(most_batch) / fmean(outputs)
        return load * min(prefill, decode)

    def mean_batch(self, load: Load) -> float:
        """Sequences that decode at a time on a lane that keeps up with `load`."""
        tokens_per_s = load.rate * fmean(a.output_tokens for a in load.arrivals)
        return min(max(1.0, self.batch_at(tokens_per_s)), len(load.arrivals))

    def slo_for(self, load: Load, batch: float) -> SLO:
        """Objectives that fit: TPOT twice a step of `batch`, TTFT twice the 95th-percentile prompt's prefill."""
        prompt = float(np.percentile([a.prompt_tokens for a in load.arrivals], 95))
        tpot = 2e3 * self.step(batch)
        return SLO(ttft_ms=_round(max(2e3 * prompt / self.prefill_tok_s, 2 * tpot)), tpot_ms=_round(tpot))


def even_split(splits: Sequence[Split]) -> str:
    """The policy under which each phase is alone on its half of the device (if it cannot be split: the whole of it).

    >>> even_split((Split(0, 26), Split(8, 18), Split(16, 10), Split(26, 0)))
    'static:16/10'
    """
    shared = [split for split in splits if not split.exclusive]
    return f"static:{min(shared, key=lambda s: abs(s.prefill - s.decode))}" if shared else "mixed"


def serve(deployment: Deployment, policy: str, count: int, prompt_tokens: int, output_tokens: int) -> Replay:
    """Serve `count` equal requests that arrive at once, on an idle deployment."""
    params = SamplingParams(max_tokens=output_tokens, ignore_eos=True)
    core: Core = deployment.core(policy, _PATIENT)
    return replay(core, [Job(0.0, range(1, prompt_tokens + 1), params, ()) for _ in range(count)], _PATIENT)


def measure(deployment: Deployment, prompt_tokens: int = 128, batch: int = 8) -> Speed:
    """Run a few requests on an even split, first to warm the workers up, then timed.

    Args:
        deployment: idle.
        prompt_tokens: prompt whose prefill is timed.
        batch: sequences of the larger of the two decode steps that are timed (the smaller has one).
    """
    policy = even_split(deployment.lanes.splits())

    serve(deployment, policy, 1, _PROMPT, 2)
    prefill = serve(deployment, policy, 1, prompt_tokens, 1).seconds
    one, many = (_step(serve(deployment, policy, count, _PROMPT, _STEPS + 2 * (count > 1))) for count in (1, batch))
    row = max(0.0, (many - one) / (batch - 1))
    return Speed(prompt_tokens / prefill, max(one - row, 1e-9), row, policy)


def _step(result: Replay) -> float:
    """Median gap between tokens once every request has its first one, in seconds."""
    began = max(s.times_s[0] for s in result.served)
    gaps = [g for s in result.served for t, g in zip(s.times_s[1:], itl_ms(s), strict=True) if t > began]
    return median(gaps or [g for s in result.served for g in itl_ms(s)]) / 1e3


def _round(milliseconds: float) -> float:
    """Two significant digits or more, so that an objective reads well."""
    return float(f"{milliseconds:.3g}")
