"""Op timings of A100, H100 and H200 under three engines, from the package ``aiconfigurator-core`` (Apache-2.0).

Attention, the linear layers, and whole forwards as the sum of both. Only measured values are summed: a shape whose ops
were not all measured is left out. Of the fused gate-and-up matmuls the grid of the data holds few; a deployment whose
fused one is absent counts gate and up as two matmuls and says so. Qwen3-32B's linears are in no rank count all there
(its down projection takes 25,600 inputs); its attention is that of Llama-3.1-70B, 64 query and 8 KV heads.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from smpart.bench.truths.models import CONFIGS, attention_only, layers_only, linears_only, rank_of
from smpart.bench.truths.truth import Truth
from smpart.partition import ModelShape, Shape
from smpart.profiler.sample import Point
from smpart.sim.op_tables import ENGINES, newest, read

GPUS = {"a100_sxm": 108, "h100_sxm": 132, "h200_sxm": 132}
"""SMs of each GPU."""

KV_DTYPES = {"bfloat16": 2, "fp8": 1}
"""Bytes of one K or V element."""

Times = dict[Shape, float]

_ATTENTION = ("batch_size", "isl", "step", "window_size", "attn_dtype", "latency")
_GEMM = ("m", "n", "k", "latency")


@dataclass(frozen=True, slots=True)
class Deployment:
    """A model over a number of tensor-parallel ranks; `fused`: gate and up are one matmul."""

    model: str
    ranks: int
    fused: bool

    def __str__(self) -> str:
        return f"{self.model}-tp{self.ranks}"

    @property
    def matmuls(self) -> list[tuple[int, int]]:
        """(outputs, inputs) of each matmul of a layer on one rank."""
        config, rank = CONFIGS[self.model], rank_of(self.model, self.ranks)
        wide = config["intermediate_size"] // self.ranks
        attention = rank.heads * rank.head_dim
        qkv = attention + 2 * rank.kv_heads * rank.head_dim
        gate_up = [(2 * wide, rank.hidden)] if self.fused else [(wide, rank.hidden)] * 2
        return [(qkv, rank.hidden), (rank.hidden, attention), *gate_up, (rank.hidden, wide)]


DEPLOYMENTS = (
    Deployment("llama-3.2-3b", 1, fused=True),
    Deployment("llama-3.1-8b", 4, fused=True),
    Deployment("qwen3-8b", 2, fused=True),
    Deployment("llama-3.1-70b", 4, fused=False),
)
"""Those whose matmuls are all in the grid that was measured."""

ATTENTIONS = ("llama-3.1-8b", "llama-3.1-70b")
"""Models whose attention is a truth by itself, on one rank; the second is Qwen3-32B's too."""


def aiconfigurator(gpus: Iterable[str] = GPUS, engines: Iterable[str] = ENGINES) -> list[Truth]:
    """All truths of some GPUs under some engines. Raises `BackendUnavailable` without the package."""
    engines = tuple(engines)
    return [truth for gpu in gpus for engine in engines for truth in _Measured(gpu, engine).truths()]


class _Measured:
    """Ops that were measured on one GPU under one engine."""

    def __init__(self, gpu: str, engine: str) -> None:
        self.gpu = gpu
        self.engine = engine

    def truths(self) -> Iterator[Truth]:
        for name in ATTENTIONS:
            for dtype, kv_bytes in KV_DTYPES.items():
                model = attention_only(rank_of(name, kv_bytes=kv_bytes))
                if times := self._attention(model, dtype):
                    yield self._truth("attention", f"{name}/kv-{dtype}", times, model, "attention of one layer")
        for deployment in DEPLOYMENTS:
            rank = rank_of(deployment.model, deployment.ranks)
            gate_up = "" if deployment.fused else "; gate and up as two matmuls"
            linears = {tokens: rank.layers * seconds for tokens, seconds in self._linears(deployment).items()}
            alone = {Shape.prefill([(tokens, 0)]): seconds for tokens, seconds in linears.items()}
            what = f"linear layers of one rank{gate_up}"
            yield self._truth("linears", str(deployment), alone, linears_only(rank), what)
            whole = {
                shape: rank.layers * seconds + linears[shape.tokens]
                for shape, seconds in self._attention(rank, "bfloat16").items()
                if shape.tokens in linears
            }
            what = f"attention and linear layers of one rank{gate_up}; no norms, head, all-reduce or launch gaps"
            yield self._truth("forward", str(deployment), whole, layers_only(rank), what)

    def _truth(self, part: str, what: str, times: Times, model: ModelShape, notes: str) -> Truth:
        units = GPUS[self.gpu]
        version = self._folder("attention" if part == "attention" else "gemm").name
        return Truth.of(
            f"aiconfigurator-{part}/{self.gpu}/{self.engine}/{what}",
            [(Point(shape, units), seconds) for shape, seconds in times.items()],
            model=model,
            units=units,
            source=f"aiconfigurator-core: {self.gpu}, {self.engine} {version}",
            licence="Apache-2.0",
            notes=notes,
        )

    def _attention(self, model: ModelShape, kv_dtype: str) -> Times:
        """Seconds of one layer's attention: prefill without context, and decode."""
        folder = self._folder("attention")
        prefill = self._heads(folder / "context_attention_perf.parquet", model, kv_dtype)
        decode = self._heads(folder / "generation_attention_perf.parquet", model, kv_dtype)
        times = {Shape.prefill([(isl, 0)] * batch): seconds for batch, isl, _, seconds in prefill}
        # `step` tokens are in the KV memory before the one that is computed.
        times.update({Shape.decode(batch, batch * (1 + step)): seconds for batch, _, step, seconds in decode})
        return times

    def _heads(self, file: Path, model: ModelShape, kv_dtype: str) -> list[tuple[int, int, int, float]]:
        wanted = {
            "num_heads": model.heads,
            "num_key_value_heads": model.kv_heads,
            "head_dim": model.head_dim,
            "kv_cache_dtype": kv_dtype,
        }
        found = [row for row in _read(file, _ATTENTION, wanted) if not row.get("window_size")]
        # 16-bit arithmetic where it was measured; some engines compute in fp8 over an fp8 KV memory only.
        dtype = min((row["attn_dtype"] for row in found), default="")
        return [
            (row["batch_size"], row["isl"], row["step"], row["latency"] / 1e3)
            for row in found
            if row["attn_dtype"] == dtype
        ]

    def _linears(self, deployment: Deployment) -> dict[int, float]:
        """Seconds of one layer's matmuls by number of tokens, where all of them were measured."""
        matmuls = [self._gemms.get(size, {}) for size in deployment.matmuls]
        tokens = sorted(set.intersection(*(set(times) for times in matmuls)))
        return {m: sum(times[m] for times in matmuls) for m in tokens}

    @cached_property
    def _gemms(self) -> dict[tuple[int, int], dict[int, float]]:
        """Seconds of 16-bit matmuls, by (outputs, inputs), then tokens."""
        wanted = {size for deployment in DEPLOYMENTS for size in deployment.matmuls}
        times: dict[tuple[int, int], dict[int, float]] = {size: {} for size in wanted}
        for row in _read(self._folder("gemm") / "gemm_perf.parquet", _GEMM, {"gemm_dtype": "bfloat16"}):
            if (size := (row["n"], row["k"])) in wanted:
                times[size][row["m"]] = row["latency"] / 1e3
        return times

    def _folder(self, kind: str) -> Path:
        """Folder of the newest version of the engine."""
        file = "context_attention_perf.parquet" if kind == "attention" else "gemm_perf.parquet"
        return newest(self.gpu, kind, self.engine, file).parent


def _read(file: Path, columns: Sequence[str], wanted: Mapping[str, Any]) -> list[dict[str, Any]]:
    table = read(file, columns, [(name, "=", value) for name, value in wanted.items()])
    return [dict(zip(columns, row, strict=True)) for row in zip(*(table[c].tolist() for c in columns), strict=True)]
