"""What a replay is judged by. Definitions follow DistServe and vLLM; TPOT excludes the first token.

* TTFT: due to first token, queueing included. TPOT: (last - first token) / (tokens - 1). ITL: each gap between tokens.
* attainment: requests that met every objective / all submitted; refused and failed ones missed.
* goodput: requests that met every objective / seconds of the replay; per GPU: divided by all that the run used.

Best-effort requests were promised nothing: objectives, latencies and the queue are those of the others (`judged`), and
goodput is over the seconds until the last of those ended.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from smpart.bench.replay import Replay, Served
from smpart.engine.request import FinishReason
from smpart.scheduler.slo import SLO

Summary = dict[str, object]


def ttft_ms(served: Served) -> float | None:
    """Milliseconds from due to first token; None if there was none."""
    return (served.times_s[0] - served.due_s) * 1e3 if served.times_s else None


def tpot_ms(served: Served) -> float | None:
    """Mean milliseconds per token after the first; None with fewer than two tokens."""
    times = served.times_s
    return (times[-1] - times[0]) / (len(times) - 1) * 1e3 if len(times) > 1 else None


def itl_ms(served: Served) -> list[float]:
    """Every gap between two consecutive tokens, in milliseconds."""
    return (np.diff(served.times_s) * 1e3).tolist() if len(served.times_s) > 1 else []


def met(served: Served, slo: SLO) -> bool:
    """Whether a request got its whole answer within every objective; an objective it has no value for is met."""
    first, pace = ttft_ms(served), tpot_ms(served)
    if not served.finished or first is None:
        return False
    return (
        first <= slo.ttft_ms
        and (pace is None or pace <= slo.tpot_ms)
        and max(itl_ms(served), default=0.0) <= slo.itl_ms
    )


def judged(replay: Replay) -> list[Served]:
    """Those that were promised something."""
    return [s for s in replay.served if not s.best_effort]


def attainment(replay: Replay, slo: SLO) -> float:
    """Share of all submitted requests that met every objective; of a replay cut short, what was still possible."""
    if replay.reachable is not None:
        return replay.reachable
    promised = judged(replay)
    return sum(met(s, slo) for s in promised) / len(promised)


def percentiles(values: Sequence[float], *points: int) -> dict[str, float | None]:
    """Percentiles by linear interpolation, keyed ``p50`` and so on; None where there are no values.

    >>> percentiles([1.0, 2.0, 3.0], 50, 99)
    {'p50': 2.0, 'p99': 2.98}
    """
    if not values:
        return dict.fromkeys((f"p{p}" for p in points), None)
    return {f"p{p}": round(float(v), 6) for p, v in zip(points, np.percentile(values, points), strict=True)}


def backlog_grows(replay: Replay) -> bool:
    """Whether the queue grew while requests arrived.

    The queue (arrived, no first token, not refused) is counted at each arrival; its least-squares trend over the
    arrivals may add at most two requests, or 5 % of all if that is more.
    """
    promised = judged(replay)
    dues = np.array([s.due_s for s in promised])
    if len(dues) < 4 or dues[-1] <= dues[0]:
        return False
    firsts = np.sort([s.times_s[0] if s.times_s else s.due_s for s in promised])
    queue = np.arange(1, len(dues) + 1) - np.searchsorted(firsts, dues, side="right")
    slope = float(np.polyfit(dues - dues[0], queue, 1)[0])
    return slope * float(dues[-1] - dues[0]) > max(2.0, 0.05 * len(dues))


def summarise(replay: Replay, slo: SLO, gpus: int = 1) -> Summary:
    """The measured part of a run record (milliseconds, seconds, tokens, as each key says).

    Args:
        gpus: devices that the run used.
    """
    served, promised, log = replay.served, judged(replay), replay.log
    finished = [s for s in served if s.finished]
    good = sum(met(s, slo) for s in promised)
    gaps = [gap for s in promised for gap in itl_ms(s)]
    seconds = span = replay.seconds
    if len(promised) < len(served):
        span = max((s.times_s[-1] if s.times_s else s.due_s for s in promised), default=0.0)
    return {
        "requests": len(served),
        "finished": len(finished),
        "refused": sum(s.reason is FinishReason.REFUSED for s in served),
        "failed": sum(s.reason is FinishReason.ERROR for s in served),
        "ttft_ms": percentiles([v for s in promised if (v := ttft_ms(s)) is not None], 50, 95, 99),
        "tpot_ms": percentiles([v for s in promised if (v := tpot_ms(s)) is not None], 50, 95, 99),
        "itl_ms": {**percentiles(gaps, 50, 99), "max": round(max(gaps), 6) if gaps else None},
        "gpus": gpus,
        "goodput_rps": good / span if span > 0 else 0.0,
        "goodput_per_gpu_rps": good / span / gpus if span > 0 else 0.0,
        "slo_attainment": good / len(promised) if promised else 0.0,
        "throughput_tok_s": sum(len(s.times_s) for s in served) / seconds if seconds > 0 else 0.0,
        "prompt_tok_s": sum(s.prompt_tokens for s in finished) / seconds if seconds > 0 else 0.0,
        "best_effort": _best_effort(served, seconds),
        "seconds": seconds,
        "cached_tokens": sum(s.cached_tokens for s in served),
        "bubble": {"prefill": log.bubble["prefill"], "decode": log.bubble["decode"]},
        "resizes": log.resizes,
        "preemptions": log.preemptions,
        "steps": log.steps,
        "decision_us": percentiles([s * 1e6 for s in log.decision_seconds], 50, 99),
    }


def _best_effort(served: Sequence[Served], seconds: float) -> Summary | None:
    """What became of the best-effort requests; None if there are none."""
    theirs = [s for s in served if s.best_effort]
    if not theirs:
        return None
    return {
        "requests": len(theirs),
        "finished": sum(s.finished for s in theirs),
        "throughput_tok_s": sum(len(s.times_s) for s in theirs) / seconds if seconds > 0 else 0.0,
        "prompt_tok_s": sum(s.prompt_tokens for s in theirs if s.finished) / seconds if seconds > 0 else 0.0,
    }
