"""Whether prefill starves, as the controller sees it in the real loop."""

from __future__ import annotations

import pytest

from smpart.bench.replay import Job, replay
from smpart.engine.deployment import Deployment
from smpart.runtime.sampling import SamplingParams
from smpart.scheduler.slo import SLO
from smpart.scheduler.started import STARVE, Started


@pytest.mark.parametrize("policy", ["smpart", "chunked+slack"])
def test_prefill_that_gets_on_in_hybrid_steps_and_bursts_does_not_starve(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is under way when such plans are made, and prefill that starves is forced on at the readers' cost."""
    real, seen, slo = Started.starving, list[bool](), SLO(ttft_ms=100, tpot_ms=12)

    def starving(self: Started, now: float) -> bool:
        seen.append(real(self, now))
        return seen[-1]

    monkeypatch.setattr(Started, "starving", starving)

    def jobs(count: int, when: float, prompt: int, tokens: int) -> list[Job]:
        params = SamplingParams(max_tokens=tokens, ignore_eos=True)
        return [Job(when, tuple(range(number, number + prompt)), params) for number in range(count)]

    with Deployment.open("llama-3.1-8b", backend="sim:h100-roofline", dtype="bfloat16", profile="none") as made:
        result = replay(made.core(policy, slo, seed=0), jobs(24, 0.0, 64, 120) + jobs(30, 0.3, 900, 40), slo)
    assert result.seconds > 2 * STARVE * slo.ttft_ms / 1e3
    assert len(seen) > 50 and not any(seen)
