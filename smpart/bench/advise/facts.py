"""What happened in a run, as far as it explains advice."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from statistics import median
from typing import Self

from smpart.bench.metrics import itl_ms, met, tpot_ms, ttft_ms
from smpart.bench.run import Run
from smpart.engine.log import Span
from smpart.partition import Side


@dataclass(frozen=True, slots=True)
class Facts:
    """Attributes:
    policy: as it was run, argument included.
    met: share of the requests that met every objective.
    misses: share that missed each objective, or was never served; one request may miss several.
    batch: sequences that decode in a step, averaged over the time of steps.
    hybrid_ms: median of steps with prompt tokens in them; None: there were none.
    plain_ms: likewise of steps without.
    hybrid_share: share of the steps' time that was steps with prompt tokens.
    bubble: share of each lane's time in which it had work waiting and ran nothing, prefill and decode.
    """

    policy: str
    rate: float
    met: float
    misses: Mapping[str, float]
    batch: float
    hybrid_ms: float | None
    plain_ms: float | None
    hybrid_share: float
    bubble: Mapping[str, float]

    @classmethod
    def of(cls, run: Run) -> Self:
        """Those of one run."""
        served, slo = run.replay.served, run.slo
        count = len(served)
        misses = {
            "TTFT": sum((ttft_ms(s) or 0.0) > slo.ttft_ms for s in served) / count,
            "TPOT": sum((tpot_ms(s) or 0.0) > slo.tpot_ms for s in served) / count,
            "ITL": sum(max(itl_ms(s), default=0.0) > slo.itl_ms for s in served) / count,
            "service": sum(not s.finished for s in served) / count,
        }
        steps = [span for span in run.replay.log.spans if span.side is Side.DECODE]
        rows = [span for span in steps if span.batch]
        hybrid = [span for span in steps if span.kind == "hybrid"]
        return cls(
            policy=str(run.record["spec"]),
            rate=float(f"{run.record['rate']:.4g}"),
            met=sum(met(s, slo) for s in served) / count,
            misses=misses,
            batch=sum(span.batch * _seconds([span]) for span in rows) / max(_seconds(rows), 1e-12),
            hybrid_ms=_middle(hybrid),
            plain_ms=_middle(span for span in steps if span.kind == "decode"),
            hybrid_share=_seconds(hybrid) / max(_seconds(steps), 1e-12),
            bubble=dict(run.replay.log.bubble),
        )

    @property
    def binding(self) -> str | None:
        """What most requests missed; None if nobody missed anything."""
        worst = max(self.misses, key=lambda name: self.misses[name])
        return worst if self.misses[worst] else None

    def record(self) -> dict[str, object]:
        """The same, ready for JSON."""
        return asdict(self)


def _seconds(spans: Iterable[Span]) -> float:
    return sum(span.finished - span.started for span in spans)


def _middle(spans: Iterable[Span]) -> float | None:
    lengths = [1e3 * (span.finished - span.started) for span in spans]
    return median(lengths) if lengths else None
