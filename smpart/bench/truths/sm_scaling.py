"""Latency against SM count on four GPUs: the fits that MuxWise's authors published.

Evaluated from the regression tables of ``ykcombat/sglang``, branch ``slo_scheduler`` (Apache-2.0). They are MuxWise's
own polynomials, so they say nothing about how good its form is; the SM axis is what they are good for.
"""

from __future__ import annotations

from collections import defaultdict

from smpart.bench.truths.models import rank_of
from smpart.bench.truths.truth import Truth
from smpart.partition import ModelShape, Shape
from smpart.profiler.sample import Point
from smpart.sim.published import rows

FILE = "sm_scaling_published_fits.csv"

_GPUS: dict[str, tuple[int, str, int]] = {
    "A100": (108, "llama-3.1-70b", 8),
    "A100_8B": (108, "llama-3.1-8b", 8),
    "H800": (132, "llama-3.1-70b", 8),
    "RTX3090": (82, "llama-3.1-8b", 2),
}
"""SMs of the whole GPU, and the model and tensor parallelism that the magnitudes suggest."""


def sm_scaling() -> list[Truth]:
    """One truth for each GPU and phase; units are SMs. Raises `UsageError` where the data is absent."""
    measured: dict[tuple[str, str], list[tuple[Point, float]]] = defaultdict(list)
    for row in rows(FILE):
        new, context, batch = (int(row[name]) for name in ("new_tokens", "context_tokens", "batch_size"))
        decode = row["phase"] == "decode"
        shape = Shape.decode(batch, context) if decode else Shape.prefill([(new, context)] * batch)
        point = Point(shape, int(row["sms"]))
        measured[row["gpu"], row["phase"]].append((point, float(row["latency_ms"]) / 1e3))
    return [
        Truth.of(
            f"sm_scaling/{gpu}/{phase}",
            points,
            model=_model(gpu),
            units=_GPUS[gpu][0],
            source="ykcombat/sglang, branch slo_scheduler: regression tables, evaluated",
            licence="Apache-2.0",
            notes="fits, not raw timings; model and ranks are not stated, taken as {1} over {2}".format(*_GPUS[gpu]),
        )
        for (gpu, phase), points in sorted(measured.items())
    ]


def _model(gpu: str) -> ModelShape:
    _, name, ranks = _GPUS[gpu]
    return rank_of(name, ranks)
