"""Kernels of an RTX 4090, as LLMServingSim's profiler timed them under vLLM 0.19 (MIT licence), folder `FOLDER`.

Timed was Llama-3.1-8B in bf16; attention over complete grids of prompt chunk, its context, decode batch and its
context, in one call. Another dense 16-bit model is priced by its own sizes at the rates that this one's ops reach.
"""

from __future__ import annotations

from collections import defaultdict
from functools import cache

from smpart.errors import UnsupportedModel
from smpart.partition import Shape
from smpart.sim.dimensions import Dimensions
from smpart.sim.grid import Curve, Grid
from smpart.sim.kernels import Part
from smpart.sim.models import DIMENSIONS
from smpart.sim.published import rows
from smpart.sim.sheaf import Sheaf

FOLDER = "measured_rtx4090"
"""Folder of the measurements, in the folder of published data."""

TIMED = "llama-3.1-8b"
"""The built-in model that was timed."""

PER_LAYER = {
    "layernorm": 2,
    "qkv_proj": 1,
    "rotary_emb": 1,
    "o_proj": 1,
    "gate_up_proj": 1,
    "act_fn": 1,
    "down_proj": 1,
}
"""How often each op runs in a layer, attention apart."""

PER_FORWARD = ("embedding", "final_layernorm")
"""Ops that run once, by tokens."""

PER_SAMPLE = ("lm_head", "sampler")
"""Ops that run once, by sampled positions."""


def attention() -> dict[tuple[int, int, int, int], float]:
    """Seconds of one layer's attention by (prompt chunk, its context, decode batch, context of each)."""
    columns = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode")
    measured = {}
    for row in rows(f"{FOLDER}/attention.csv"):
        chunk, before, batch, context = (int(row[name]) for name in columns)
        measured[chunk, before, batch, context] = float(row["time_us"]) / 1e6
    return measured


def ops(file: str, size: str) -> dict[str, dict[float, float]]:
    """Seconds by op and size."""
    measured: dict[str, dict[float, float]] = defaultdict(dict)
    for row in rows(f"{FOLDER}/{file}"):
        measured[row["layer"]][int(row[size])] = float(row["time_us"]) / 1e6
    return measured


class _Tables:
    """The measurements as functions."""

    def __init__(self) -> None:
        times = attention()
        chunks, befores, batches, contexts = (sorted({node[i] for node in times if node[i]}) for i in range(4))
        befores = [0, *befores]
        joint = [size for size in batches if (chunks[0], 0, size, contexts[0]) in times]
        self.prefill = Grid([chunks, befores], {(c, k): times[c, k, 0, 0] for c in chunks for k in befores})
        self.decode = Sheaf({n: {k: times[0, 0, n, k] for k in contexts} for n in batches})
        self.mixed = Grid([chunks, befores, joint, contexts], {node: t for node, t in times.items() if all(node[::2])})
        self.dense = {op: Curve(points) for op, points in ops("dense.csv", "tokens").items()}
        self.sampled = {op: Curve(points) for op, points in ops("per_sequence.csv", "sequences").items()}


_tables = cache(_Tables)


class Rtx4090:
    """Kernels of a dense 16-bit model on one RTX 4090.

    Raises:
        UnsupportedModel: weights of another kind, experts, or several ranks: none was timed.
        UsageError: the measurements are absent.
    """

    def __init__(self, model: Dimensions) -> None:
        if model.experts is not None or model.weights != "bfloat16" or model.ranks != 1:
            raise UnsupportedModel(
                "sim:rtx4090 prices dense 16-bit models on one GPU, nothing else was timed there: "
                "try sim:h100, or sim:rtx4090-roofline"
            )
        self._tables = _tables()
        self._model, self._attention = model, model.attention
        timed = DIMENSIONS[TIMED]
        width = model.hidden / timed.hidden
        self._scale = {
            "layernorm": width,
            "embedding": width,
            "final_layernorm": width,
            "rotary_emb": model.attention_width / timed.attention_width,
            "act_fn": model.intermediate / timed.intermediate,
            "sampler": model.shape.vocab / timed.shape.vocab,
            "lm_head": model.shape.head_params / timed.shape.head_params,
        }
        pairs = zip(("qkv_proj", "o_proj", "gate_up_proj", "down_proj"), model.matmuls, timed.matmuls, strict=True)
        self._scale.update({op: (n * k) / (n0 * k0) for op, (n, k), (n0, k0) in pairs})
        self._heads = model.attention_width / timed.attention_width
        self._kv = model.kv_width / timed.kv_width

    def layers(self, tokens: int) -> tuple[Part, ...]:
        """See `Kernels`."""
        dense, scale = self._tables.dense, self._scale
        seconds = self._model.layers * sum(times * scale[op] * dense[op](tokens) for op, times in PER_LAYER.items())
        seconds += sum(scale[op] * dense[op](tokens) for op in PER_FORWARD)
        return (Part(seconds, *self._model.linear_work(tokens)),)

    def head(self, sampled: int) -> tuple[Part, ...]:
        """See `Kernels`."""
        seconds = sum(self._scale[op] * self._tables.sampled[op](sampled) for op in PER_SAMPLE)
        return (Part(seconds, *self._model.head_work(sampled)),)

    def attention(self, shape: Shape) -> Part:
        """See `Kernels`: in one call."""
        return Part(self._model.layers * self._seconds(shape), *self._attention.work(shape))

    def _seconds(self, shape: Shape) -> float:
        """Seconds of one layer's attention over a batch of any mix."""
        tables, batch = self._tables, shape.decode_batch
        context = shape.decode_context / batch if batch else 0.0
        if not shape.prefill_tokens:
            return self._kv * tables.decode.along(batch)(context)
        tokens = shape.prefill_tokens
        # Several chunks in one call do the work of one as long as all of them, with a context of its own; where they
        # attend to less than that one would to itself, the work above a launch shrinks with the pairs.
        before = shape.prefill_pairs / tokens - (tokens + 1) / 2
        alone = tables.prefill(tokens, max(0.0, before))
        saved = 0.0
        if before < 0.0:
            saved = (alone - tables.prefill(1, 0)) * (1.0 - shape.prefill_pairs / (tokens * (tokens + 1) / 2))
        if not batch:
            return self._heads * (alone - saved)
        both = tables.mixed(tokens, max(0.0, before), batch, context)
        share = alone / (alone + tables.decode.along(batch)(context))
        return (self._heads * share + self._kv * (1.0 - share)) * (both - saved)
