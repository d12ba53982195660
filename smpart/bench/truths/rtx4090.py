"""Llama-3.1-8B on one RTX 4090, as LLMServingSim's profiler measured it under vLLM 0.19 (MIT licence).

The only published timings of attention over mixed batches. Whole forwards are sums of measured ops, for the token and
sequence counts that were all measured; nothing is interpolated.
"""

from __future__ import annotations

from collections.abc import Mapping

from smpart.bench.truths.models import attention_only, rank_of
from smpart.bench.truths.truth import Truth
from smpart.partition import Shape
from smpart.profiler.sample import Point
from smpart.sim.rtx4090 import PER_FORWARD, PER_LAYER, attention, ops

SMS = 128
MODEL = "llama-3.1-8b"

_SOURCE = "casys-kaist/LLMServingSim: Llama-3.1-8B bf16 on an RTX 4090, vLLM 0.19"


def rtx4090() -> list[Truth]:
    """Attention of one layer, and whole forwards. Raises `UsageError` where the data is absent."""
    layers = _attention()
    model = rank_of(MODEL)
    layer = Truth.of(
        "rtx4090-attention/llama-3.1-8b",
        [(Point(shape, SMS), seconds) for shape, seconds in layers.items()],
        model=attention_only(model),
        units=SMS,
        source=_SOURCE,
        licence="MIT",
        notes="one layer's attention; prefill chunk and decode rows in one call",
    )
    forward = Truth.of(
        "rtx4090-forward/llama-3.1-8b",
        [(Point(shape, SMS), seconds) for shape, seconds in _forwards(layers, model.layers).items()],
        model=model,
        units=SMS,
        source=_SOURCE,
        licence="MIT",
        notes="sum of measured ops (two norms a layer), sampler and launches between ops left out",
    )
    return [layer, forward]


def _attention() -> dict[Shape, float]:
    """Seconds of one layer's attention."""
    measured = {}
    for (chunk, before, batch, context), seconds in attention().items():
        prefill = Shape.prefill([(chunk, before)] if chunk else [])
        measured[prefill.join(Shape.decode(batch, batch * context))] = seconds
    return measured


def _forwards(layer_times: Mapping[Shape, float], layers: int) -> dict[Shape, float]:
    """Seconds of whole forwards, where every op of it was measured."""
    dense, head = ops("dense.csv", "tokens"), ops("per_sequence.csv", "sequences")["lm_head"]
    whole = {}
    for shape, seconds in layer_times.items():
        tokens, sampled = shape.tokens, shape.prefill_chunks + shape.decode_batch
        if sampled in head and all(tokens in dense[op] for op in (*PER_LAYER, *PER_FORWARD)):
            layer = seconds + sum(times * dense[op][tokens] for op, times in PER_LAYER.items())
            whole[shape] = layers * layer + sum(dense[op][tokens] for op in PER_FORWARD) + head[sampled]
    return whole
