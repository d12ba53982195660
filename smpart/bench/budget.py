"""A fair token budget for chunked prefill, so that what smpart is compared with is set up as an expert would."""

from __future__ import annotations

from collections.abc import Callable

from smpart.bench.probe import Speed, serve
from smpart.engine.deployment import Deployment
from smpart.scheduler.slo import SLO

BUDGETS = tuple(1 << k for k in range(5, 12))
"""32 to 2048 tokens a step."""
_HEADROOM = 1.25
"""Prompt tokens a second over those that arrive which a budget must be able to take in."""
_NEARLY = 0.9


def fair_budget(deployment: Deployment, speed: Speed, slo: SLO, batch: float, prompt_tok_s: float) -> int:
    """Measure prompts of every budget alone on the whole device, as far as they fit, and `choose` among the budgets.

    A hybrid step is taken to last as long as its prompt tokens and a decode step of `batch` on one lane together.
    """
    longest = deployment.max_len - 1

    def hybrid_s(budget: int) -> float:
        return speed.step(batch) + serve(deployment, "mixed", 1, min(budget, longest), 1).seconds

    return choose(hybrid_s, slo.tpot_ms / 1e3, prompt_tok_s)


def choose(hybrid_s: Callable[[int], float], tpot_s: float, prompt_tok_s: float) -> int:
    """The largest budget whose step takes one TPOT, but no less than what keeps up with the prompts that arrive.

    If none keeps up, no less than the least that takes nearly as many in as the fastest does.

    Args:
        hybrid_s: seconds of a step with so many prompt tokens; asked in ascending order, no further than needed.

    >>> choose(lambda tokens: 0.1 + tokens / 1000, 0.4, 100.0), choose(lambda tokens: 0.1 + tokens / 1000, 0.1, 500.0)
    (256, 256)
    """
    fit, enough = 0, 0
    rates = []
    for budget in BUDGETS:
        seconds = hybrid_s(budget)
        rates.append(budget / seconds)
        fits = seconds <= tpot_s
        fit = budget if fits else fit
        enough = enough or (budget if rates[-1] >= _HEADROOM * prompt_tok_s else 0)
        if not fits and enough:
            break
    nearly = next(b for b, rate in zip(BUDGETS, rates, strict=False) if rate >= _NEARLY * max(rates))
    return max(fit, enough or nearly)
