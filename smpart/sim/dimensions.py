"""The sizes of a model that its kernels are looked up by: more than `ModelShape` tells, and as one rank has them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from smpart.errors import UnsupportedModel
from smpart.partition import ModelShape, Shape, model_shape
from smpart.partition.model_config import UNGATED, is_sparse

Weights = Literal["bfloat16", "fp8", "fp8_block"]
"""16-bit weights (32-bit ones are priced as such), 8-bit ones with a scale a tensor or channel, or a scale a block."""

KV = Literal["bfloat16", "fp8"]
"""Elements of the KV memory."""

_BYTES = {"bfloat16": 2, "fp8": 1, "fp8_block": 1}


@dataclass(frozen=True, slots=True)
class Experts:
    """The sparse feed-forward layers of a mixture of experts.

    Attributes:
        layers: how many layers are sparse.
        count, active: experts of a layer, and those that one token goes through.
        width: inner width of one expert.
        shared: inner width of the experts that every token goes through, together.
    """

    layers: int
    count: int
    active: int
    width: int
    shared: int

    def touched(self, tokens: int) -> float:
        """Experts that at least one of some tokens goes through, if each draws its own evenly."""
        return self.count * (1.0 - (1.0 - self.active / self.count) ** tokens)


class Attention(NamedTuple):
    """What attention works on, all layers together: every query-key pair once, every K and V once.

    Attributes:
        pair: operations of a pair.
        stored: bytes of a token's K and V.
        query: bytes of a computed token's query and result.
    """

    pair: float
    stored: float
    query: float

    def work(self, shape: Shape) -> tuple[float, float]:
        """Operations, and bytes moved."""
        context = shape.decode_context
        computed = shape.prefill_tokens + shape.decode_batch
        moved = self.stored * (shape.prefill_context + context + computed) + self.query * computed
        return self.pair * (shape.prefill_pairs + context), moved


@dataclass(frozen=True, slots=True)
class Dimensions:
    """A decoder-only model as one rank of tensor parallelism computes it.

    Attributes:
        shape: dimensions of the whole model, element sizes as served.
        intermediate: inner width of a dense feed-forward layer of the whole model.
        gated: whether it multiplies by a gate as well.
        experts: the sparse layers; None: all are dense.
        ranks: GPUs that share every matmul.
    """

    shape: ModelShape
    intermediate: int
    gated: bool = True
    experts: Experts | None = None
    weights: Weights = "bfloat16"
    kv: KV = "bfloat16"
    ranks: int = 1

    @property
    def layers(self) -> int:
        """Decoder layers."""
        return self.shape.layers

    @property
    def dense_layers(self) -> int:
        """Layers whose feed-forward part is dense."""
        return self.layers - (self.experts.layers if self.experts else 0)

    @property
    def hidden(self) -> int:
        """Width of the residual stream."""
        return self.shape.hidden

    @property
    def heads(self) -> int:
        """Query heads of one rank."""
        return -(-self.shape.heads // self.ranks)

    @property
    def kv_heads(self) -> int:
        """KV heads of one rank (at least one: heads are copied where there are more ranks)."""
        return -(-self.shape.kv_heads // self.ranks)

    @property
    def rank(self) -> ModelShape:
        """What one rank computes and holds."""
        whole = self.shape
        return replace(
            whole,
            heads=self.heads,
            kv_heads=self.kv_heads,
            linear_params=whole.linear_params // self.ranks,
            head_params=whole.head_params // self.ranks,
            weight_bytes=whole.weight_bytes // self.ranks,
        )

    @property
    def attention_width(self) -> int:
        """Elements of one rank's queries of a token."""
        return self.heads * self.shape.head_dim

    @property
    def kv_width(self) -> int:
        """Elements of one rank's keys of a token."""
        return self.kv_heads * self.shape.head_dim

    @property
    def attention_matmuls(self) -> tuple[tuple[int, int], ...]:
        """(outputs, inputs) of one rank's matmuls around the attention of a layer."""
        qkv = (self.attention_width + 2 * self.kv_width, self.hidden)
        return qkv, (self.hidden, self.attention_width)

    def feed_forward(self, width: int) -> tuple[tuple[int, int], ...]:
        """(outputs, inputs) of one rank's matmuls in a feed-forward part of some inner width."""
        inner = -(-width // self.ranks)
        return ((2 if self.gated else 1) * inner, self.hidden), (self.hidden, inner)

    @property
    def matmuls(self) -> tuple[tuple[int, int], ...]:
        """(outputs, inputs) of one rank's matmuls in a dense layer."""
        return *self.attention_matmuls, *self.feed_forward(self.intermediate)

    @property
    def head(self) -> tuple[int, int]:
        """(outputs, inputs) of one rank's share of the language-model head."""
        return -(-self.shape.vocab // self.ranks), self.hidden

    @property
    def weight_element(self) -> int:
        """Bytes of one weight in the layers."""
        return _BYTES[self.weights]

    @property
    def attention(self) -> Attention:
        """What one rank's attention of all layers works on."""
        width = self.attention_width
        stored = 2.0 * self.kv_width * _BYTES[self.kv]
        return Attention(4.0 * self.layers * width, self.layers * stored, self.layers * 4.0 * width)

    def linear_work(self, tokens: int) -> tuple[float, float]:
        """Operations and bytes of one rank's matmuls of all layers: touched weights and 16-bit results once."""
        attention = [(self.layers, size) for size in self.attention_matmuls]
        dense = [(self.dense_layers, size) for size in self.feed_forward(self.intermediate)]
        flops = moved = 0.0
        for layers, (n, k) in (*attention, *dense):
            flops += 2.0 * layers * n * k * tokens
            moved += layers * (self.weight_element * n * k + 2.0 * tokens * (n + k))
        if self.experts is None:
            return flops, moved
        experts, touched = self.experts, self.experts.touched(tokens)
        each = sum(n * k for n, k in self.feed_forward(experts.width))
        always = sum(n * k for n, k in self.feed_forward(experts.shared)) + experts.count * self.hidden
        flops += 2.0 * experts.layers * tokens * (experts.active * each + always)
        return flops, moved + experts.layers * self.weight_element * (touched * each + always)

    def head_work(self, sampled: int) -> tuple[float, float]:
        """Operations and bytes of one rank's share of the head, which stays 16-bit."""
        n, k = self.head
        return 2.0 * n * k * sampled, 2.0 * (n * k + sampled * (n + k))


def dimensions(
    config: Mapping[str, Any], *, weights: Weights | None = None, kv: KV = "bfloat16", ranks: int = 1
) -> Dimensions:
    """From a parsed `config.json`, or `PretrainedConfig.to_dict()`.

    Args:
        weights: None: as its ``quantization_config`` says, 16-bit without one.
        ranks: GPUs of tensor parallelism.

    Raises:
        UnsupportedModel: layers without a plain K and V for each token, weights of a kind that is not priced, or heads
            that the ranks cannot share.
        UsageError: a dimension is missing or makes no sense.

    >>> small = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128,
    ...          "vocab_size": 100}
    >>> dimensions(small, ranks=2).matmuls
    ((96, 64), (64, 32), (128, 64), (64, 64))
    """
    config = {**config, **(config.get("text_config") or {})}
    stored = weights or _stored(config)
    shape = model_shape(config, weight_bytes=_BYTES[stored], kv_bytes=_BYTES[kv])
    if ranks < 1 or shape.heads % ranks or max(shape.kv_heads, ranks) % min(shape.kv_heads, ranks):
        raise UnsupportedModel(f"{shape.heads} heads over {shape.kv_heads} KV heads cannot be shared by {ranks} GPUs")
    names = ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size")
    wide = next((config[name] for name in names if config.get(name)), 4 * shape.hidden)
    gated = config.get("model_type") not in UNGATED
    return Dimensions(shape, wide, gated, _experts(config, shape.layers), stored, kv, ranks)


def _experts(config: Mapping[str, Any], layers: int) -> Experts | None:
    count = next((config[n] for n in ("num_local_experts", "num_experts", "n_routed_experts") if config.get(n)), 0)
    sparse = sum(is_sparse(config, layer) for layer in range(layers)) if count else 0
    if not sparse:
        return None
    width = config.get("moe_intermediate_size") or config["intermediate_size"]
    active = next(config[n] for n in ("num_experts_per_tok", "top_k", "moe_topk") if config.get(n))
    shared = (config.get("shared_expert_intermediate_size") or 0) + width * (config.get("n_shared_experts") or 0)
    return Experts(sparse, count, active, width, shared)


def _stored(config: Mapping[str, Any]) -> Weights:
    quantised = config.get("quantization_config") or {}
    method = quantised.get("quant_method")
    if method is None:
        return "bfloat16"
    if method == "fp8":
        return "fp8_block" if quantised.get("weight_block_size") else "fp8"
    raise UnsupportedModel(f"weights quantised as {method!r} are not priced: 16-bit and fp8 ones are")
