"""Kernels of A100, H100 and H200 under an engine, from the op tables of ``aiconfigurator-core``.

Matmuls are interpolated in their sizes and tokens, attention in lengths, batch and KV tokens. What the tables lack is
stated here: norms, rotations and activations stream their operands (`_STREAM`), heads of another count are priced in
proportion to the nearest that was timed, and of chunks behind a context, which were timed at none, a share of a longer
prompt with the same tokens and query-key pairs is counted.
"""

from __future__ import annotations

import math
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from smpart.errors import UnsupportedModel
from smpart.partition import Shape
from smpart.sim import op_tables
from smpart.sim.dimensions import Dimensions
from smpart.sim.gpus import PEAKS
from smpart.sim.grid import Curve
from smpart.sim.kernels import TILE, Part
from smpart.sim.sheaf import Sheaf

_LAUNCH = 2.5e-6
"""Least seconds of an elementwise kernel: those measured on an RTX 4090 take 2.5 to 3.3 us for one token."""

_STREAM = 0.7
"""Share of peak bandwidth at which elementwise kernels stream."""

_SMALL_KERNELS = 4
"""Elementwise kernels of a layer: two norms with the residual, rotation and KV write, activation."""

_GRID = "balanced"
"""Expert loads that are taken where several were timed."""

Times = dict[float, float]


class Measured:
    """Kernels of one rank of a model on one GPU under an engine.

    Args:
        gpu: a name of `op_tables.FOLDERS`.
        engine: one of `op_tables.ENGINES`.
        pads: matmuls are padded to more tokens where more take less time.

    Raises:
        BackendUnavailable: the package is not installed, or holds no timings of the kind.
        UnsupportedModel: sizes or weights of a kind that was not timed.
    """

    def __init__(self, model: Dimensions, gpu: str, engine: str = "vllm", pads: bool = True) -> None:
        self._model, self._bandwidth, self._pads = model, PEAKS[gpu].bandwidth, pads
        self._system, self._engine = op_tables.FOLDERS[gpu], engine
        layers, dense = model.layers, model.dense_layers
        self._layers, self._heads, self._attention = layers, model.heads, model.attention
        sizes = [(layers, size) for size in model.attention_matmuls]
        sizes += [(dense, size) for size in model.feed_forward(model.intermediate) if dense]
        self._linear = _total([(n, self._matmul(size, model.weights)) for n, size in sizes])
        work = sum(count * n * k for count, (n, k) in sizes)
        self._columns = sum(count * n * k * -(-n // TILE) for count, (n, k) in sizes) / work
        self._head = Curve(self._matmul(model.head, "bfloat16"))
        self._prefill = self._prefill_attention()
        self._decode = self._decode_attention()
        self._experts = self._expert_layers()
        self._reduce = self._all_reduce()

    def layers(self, tokens: int) -> tuple[Part, ...]:
        """See `Kernels`."""
        model = self._model
        linear = self._linear(tokens) + (self._experts(tokens) if self._experts else 0.0)
        small, moved = self._elementwise(tokens)
        parts = (
            Part(linear, *model.linear_work(tokens), -(-tokens // TILE) * self._columns),
            Part(model.layers * small, 0.0, model.layers * moved),
        )
        if self._reduce is None:
            return parts
        return (*parts, Part(2 * model.layers * self._reduce(tokens * model.hidden), 0.0, 0.0))

    def head(self, sampled: int) -> tuple[Part, ...]:
        """See `Kernels`."""
        n, _ = self._model.head
        tiles = -(-n // TILE) * -(-sampled // TILE)
        return (Part(self._head(sampled), *self._model.head_work(sampled), tiles),)

    def attention(self, shape: Shape) -> Part:
        """See `Kernels`: prompts and decodes in one call or two."""
        seconds = 0.0
        if shape.prefill_tokens:
            length = 2.0 * shape.prefill_pairs / shape.prefill_tokens - 1.0
            seconds += self._prefill(max(1.0, length), shape.prefill_tokens)
        if shape.decode_batch:
            seconds += self._decode.along(shape.decode_batch)(shape.decode_context)
        tiles = self._heads * max(1, -(-shape.tokens // TILE))
        return Part(self._layers * seconds, *self._attention.work(shape), tiles)

    # ---- attention

    def _prefill_attention(self) -> Sheaf:
        """Seconds by length of the prompts and tokens of all."""
        path = op_tables.newest(self._system, "attention", self._engine, "context_attention_perf.parquet")
        rows, scale = self._nearest(path)
        curves: dict[float, Times] = {}
        for batch, length, seconds in zip(rows["batch_size"], rows["isl"], rows["latency"] / 1e3, strict=True):
            _lower(curves.setdefault(float(length), {}), float(batch * length), scale * float(seconds))
        floor = min(min(times.values()) for times in curves.values())
        for times in curves.values():
            times.setdefault(0.0, floor)
        return Sheaf(curves)

    def _decode_attention(self) -> Sheaf:
        """Seconds by batch and KV tokens of all, the new ones included."""
        path = op_tables.newest(self._system, "attention", self._engine, "generation_attention_perf.parquet")
        rows, scale = self._nearest(path)
        curves: dict[float, Times] = {}
        for batch, step, seconds in zip(rows["batch_size"], rows["step"], rows["latency"] / 1e3, strict=True):
            _lower(curves.setdefault(float(batch), {}), float(batch * (step + 1)), scale * float(seconds))
        return Sheaf(curves)

    def _nearest(self, path: Path) -> tuple[op_tables.Columns, float]:
        """Rows of the nearest heads that were timed, and what one of theirs counts."""
        model = self._model
        wanted = {"num_key_value_heads": model.kv_heads, "head_dim": model.shape.head_dim, "num_heads": model.heads}
        names = [*wanted, "batch_size", "isl", "step", "window_size", "attn_dtype", "latency"]
        table = op_tables.read(path, names, [("kv_cache_dtype", "=", model.kv)])
        # 16-bit arithmetic where it was timed; some engines compute in fp8 over an fp8 KV memory only.
        kept = np.asarray(table["window_size"] == 0)
        if not kept.any():
            raise UnsupportedModel(f"no attention over {model.kv} KV was timed on {self._system} under {self._engine}")
        kept &= table["attn_dtype"] == min(table["attn_dtype"][kept])
        scale = 1.0
        for name, value in wanted.items():
            values = np.unique(table[name][kept])
            nearest = int(values[np.argmin(np.abs(np.log(values / value)))])
            kept &= table[name] == nearest
            if name != "num_key_value_heads" or path.name.startswith("generation"):
                scale *= value / nearest if name != "num_heads" or path.name.startswith("context") else 1.0
        return {name: column[kept] for name, column in table.items()}, scale

    # ---- matmuls

    def _matmul(self, size: tuple[int, int], weights: str) -> Times:
        """Seconds of one matmul by tokens, bilinear between the sizes that were timed."""
        path = op_tables.newest(self._system, "gemm", self._engine, "gemm_perf.parquet")
        nodes = [_around(op_tables.distinct(path, name), value) for name, value in zip("nk", size, strict=True)]
        filters = [("gemm_dtype", "=", weights), *((c, "in", sorted(at)) for c, at in zip("nk", nodes, strict=True))]
        rows = op_tables.read(path, ["m", "n", "k", "latency"], filters)
        times: dict[tuple[int, int], Times] = {}
        for m, n, k, ms in zip(rows["m"], rows["n"], rows["k"], rows["latency"], strict=True):
            _lower(times.setdefault((int(n), int(k)), {}), float(m), float(ms) / 1e3)
        corners = [((n, k), wn * wk) for n, wn in nodes[0].items() for k, wk in nodes[1].items()]
        shared = set.intersection(*(set(times.get(corner, ())) for corner, _ in corners))
        if not shared:
            raise UnsupportedModel(f"no {weights} matmul like {size} was timed on {self._system} under {self._engine}")
        found = {m: sum(weight * times[corner][m] for corner, weight in corners) for m in sorted(shared)}
        return _padded(found) if self._pads else found

    def _expert_layers(self) -> Curve | None:
        """Seconds of all sparse layers by tokens: the routed experts as they were timed, router and shared ones as
        matmuls."""
        model, experts = self._model, self._model.experts
        if experts is None:
            return None
        path = op_tables.newest(self._system, "moe", self._engine, "moe_perf.parquet")
        wanted = {"hidden_size": model.hidden, "inter_size": experts.width, "topk": experts.active}
        wanted |= {"num_experts": experts.count, "moe_tp_size": model.ranks, "moe_ep_size": 1}
        filters = [("moe_dtype", "=", model.weights), *((name, "=", value) for name, value in wanted.items())]
        rows = op_tables.read(path, ["num_tokens", "distribution", "latency"], filters)
        if not len(rows["latency"]):
            sizes = f"{experts.count} experts of {model.hidden} x {experts.width}, {experts.active} a token"
            raise UnsupportedModel(
                f"no {model.weights} mixture of {sizes} over {model.ranks} GPUs was timed on {self._system} "
                f"under {self._engine}"
            )
        routed: Times = {}
        even = rows["distribution"] == (_GRID if _GRID in rows["distribution"] else rows["distribution"][0])
        for tokens, ms in zip(rows["num_tokens"][even], rows["latency"][even], strict=True):
            _lower(routed, float(tokens), float(ms) / 1e3)
        dense = [(experts.layers, self._matmul((experts.count, model.hidden), "bfloat16"))]
        if experts.shared:
            dense += [(experts.layers, self._matmul(s, model.weights)) for s in model.feed_forward(experts.shared)]
        return _total([(experts.layers, routed), *dense])

    # ---- the rest

    def _elementwise(self, tokens: int) -> tuple[float, float]:
        """Seconds of one layer's elementwise kernels, and bytes that they move."""
        model = self._model
        width = 8 * model.hidden + 2 * (model.attention_width + 2 * model.kv_width)
        inner = model.experts.active * model.experts.width if model.experts else model.intermediate
        moved = 2.0 * tokens * (width + 3 * inner / model.ranks)
        return _SMALL_KERNELS * _LAUNCH + moved / (_STREAM * self._bandwidth), moved

    def _all_reduce(self) -> Curve | None:
        """Seconds of one all-reduce by elements; None on one GPU. The quickest of the engine's own kernel and NCCL."""
        ranks = self._model.ranks
        if ranks == 1:
            return None
        times: Times = {}
        path = op_tables.newest(self._system, "comm", self._engine, "custom_allreduce_perf.parquet")
        rows = op_tables.read(path, ["message_size", "latency"], [("num_gpus", "=", ranks)])
        if not len(rows["latency"]):
            raise UnsupportedModel(f"no all-reduce over {ranks} GPUs was timed on {self._system}")
        for elements, ms in zip(rows["message_size"], rows["latency"], strict=True):
            _lower(times, float(elements), float(ms) / 1e3)
        return Curve(times)


@lru_cache(maxsize=64)
def measured(model: Dimensions, gpu: str, engine: str, pads: bool = True) -> Measured:
    """`Measured`, read once a process."""
    return Measured(model, gpu, engine, pads)


def _around(nodes: NDArray[np.int64], value: int) -> dict[int, float]:
    """The nodes on both sides of a value and their weights; beyond the last, that one in proportion."""
    high = int(np.searchsorted(nodes, value))
    if high == len(nodes) or high == 0:
        nearest = int(nodes[min(high, len(nodes) - 1)])
        return {nearest: value / nearest if high else 1.0}
    low, top = int(nodes[high - 1]), int(nodes[high])
    if top == value:
        return {top: 1.0}
    part = (value - low) / (top - low)
    return {low: 1.0 - part, top: part}


def _padded(times: Times) -> Times:
    """No matmul takes longer than one of more tokens: it is padded to that. Under vLLM and SGLang fp8 ones were timed
    that take up to 2.7 times as long for one token more than a multiple of 256, and less again for more tokens."""
    least = math.inf
    found: Times = {}
    for tokens in sorted(times, reverse=True):
        least = min(least, times[tokens])
        found[tokens] = least
    return found


def _total(counted: list[tuple[int, Times]]) -> Curve:
    """A curve that is the sum of several, each a number of times, at the nodes of the first within all."""
    curves = [(count, Curve(times)) for count, times in counted]
    nodes = sorted(set().union(*(times for _, times in counted)))
    last = max(max(times) for _, times in counted)
    return Curve({m: sum(count * each(m) for count, each in curves) for m in nodes if m <= last})


def _lower(times: Times, at: float, seconds: float) -> None:
    """Of several kernels that were timed at one place the quickest counts: engines choose."""
    times[at] = min(seconds, times.get(at, math.inf))
