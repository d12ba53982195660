"""Llama-3.1-8B on one RTX 4090, as LLMServingSim's profiler measured it under vLLM 0.19 (MIT licence).

The only published timings of attention over mixed batches. Whole forwards are sums of measured ops, for the token and
sequence counts that were all measured; nothing is interpolated.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from smpart.bench.truths.models import attention_only, rank_of
from smpart.bench.truths.truth import Truth
from smpart.partition import Shape
from smpart.profiler.sample import Point
from smpart.sim.published import rows

FOLDER = "measured_rtx4090"
SMS = 128
MODEL = "llama-3.1-8b"

_SOURCE = "casys-kaist/LLMServingSim: Llama-3.1-8B bf16 on an RTX 4090, vLLM 0.19"
_PER_LAYER = {
    "layernorm": 2,
    "qkv_proj": 1,
    "rotary_emb": 1,
    "o_proj": 1,
    "gate_up_proj": 1,
    "act_fn": 1,
    "down_proj": 1,
}
"""How often each op runs in a layer, attention apart."""

_PER_FORWARD = ("embedding", "final_layernorm")


def rtx4090() -> list[Truth]:
    """Attention of one layer, and whole forwards. Raises `UsageError` where the data is absent."""
    attention = _attention()
    model = rank_of(MODEL)
    layer = Truth.of(
        "rtx4090-attention/llama-3.1-8b",
        [(Point(shape, SMS), seconds) for shape, seconds in attention.items()],
        model=attention_only(model),
        units=SMS,
        source=_SOURCE,
        licence="MIT",
        notes="one layer's attention; prefill chunk and decode rows in one call",
    )
    forward = Truth.of(
        "rtx4090-forward/llama-3.1-8b",
        [(Point(shape, SMS), seconds) for shape, seconds in _forwards(attention, model.layers).items()],
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
    for row in rows(f"{FOLDER}/attention.csv"):
        chunk, before, batch, kv = (int(row[k]) for k in ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode"))
        prefill = Shape.prefill([(chunk, before)] if chunk else [])
        measured[prefill.join(Shape.decode(batch, batch * kv))] = float(row["time_us"]) / 1e6
    return measured


def _forwards(attention: Mapping[Shape, float], layers: int) -> dict[Shape, float]:
    """Seconds of whole forwards, where every op of it was measured."""
    dense, head = _ops("dense.csv", "tokens"), _ops("per_sequence.csv", "sequences")["lm_head"]
    whole = {}
    for shape, seconds in attention.items():
        tokens, sampled = shape.tokens, shape.prefill_chunks + shape.decode_batch
        if sampled in head and all(tokens in dense[op] for op in (*_PER_LAYER, *_PER_FORWARD)):
            layer = seconds + sum(times * dense[op][tokens] for op, times in _PER_LAYER.items())
            whole[shape] = layers * layer + sum(dense[op][tokens] for op in _PER_FORWARD) + head[sampled]
    return whole


def _ops(file: str, size: str) -> dict[str, dict[int, float]]:
    """Seconds by op and size."""
    ops: dict[str, dict[int, float]] = defaultdict(dict)
    for row in rows(f"{FOLDER}/{file}"):
        ops[row["layer"]][int(row[size])] = float(row["time_us"]) / 1e6
    return ops
