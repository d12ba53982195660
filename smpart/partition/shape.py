"""The size of a piece of work, and of the model it runs through: what a cost depends on."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Shape:
    """The size of one forward: a prefill part, a decode part, or (a hybrid step) both.

    Attributes:
        prefill_tokens: prompt tokens computed, over all packed chunks.
        prefill_context: tokens already in the KV memory before those chunks, summed over chunks.
        prefill_pairs: query-key pairs of the chunks, each chunk counting ``new * context + new * (new + 1) / 2``.
        prefill_chunks: number of packed chunks.
        decode_batch: sequences that each compute one token.
        decode_context: tokens those sequences attend to, summed.
    """

    prefill_tokens: int = 0
    prefill_context: int = 0
    prefill_pairs: float = 0.0
    prefill_chunks: int = 0
    decode_batch: int = 0
    decode_context: int = 0

    @classmethod
    def prefill(cls, chunks: Iterable[tuple[int, int]]) -> Shape:
        """Shape of packed chunks, each ``(new tokens, context tokens)``.

        >>> Shape.prefill([(4, 0), (2, 10)]).prefill_pairs
        33.0
        """
        tokens = context = count = 0
        pairs = 0.0
        for new, old in chunks:
            tokens, context, count = tokens + new, context + old, count + 1
            pairs += new * old + new * (new + 1) / 2
        return cls(tokens, context, pairs, count)

    @classmethod
    def decode(cls, batch: int, context: int) -> Shape:
        """Shape of one step of `batch` sequences attending to `context` tokens in all."""
        return cls(decode_batch=batch, decode_context=context)

    def join(self, other: Shape) -> Shape:
        """The hybrid shape of two parts run in one forward."""
        return Shape(
            self.prefill_tokens + other.prefill_tokens,
            self.prefill_context + other.prefill_context,
            self.prefill_pairs + other.prefill_pairs,
            self.prefill_chunks + other.prefill_chunks,
            self.decode_batch + other.decode_batch,
            self.decode_context + other.decode_context,
        )

    @property
    def tokens(self) -> int:
        """Tokens computed."""
        return self.prefill_tokens + self.decode_batch

    @property
    def hybrid(self) -> bool:
        """Whether both phases are in this one forward."""
        return self.prefill_tokens > 0 and self.decode_batch > 0


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The dimensions of a decoder-only model that its cost and memory depend on.

    Attributes:
        weight_bytes: bytes of all weights a forward reads, the head included, the embedding table not.
        linear_params: weights that each token is multiplied with in the decoder layers (active experts only).
        head_params: weights of the language-model head, applied to sampled positions only.
        kv_bytes: bytes of one stored K or V element.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    linear_params: int
    head_params: int
    weight_bytes: int
    kv_bytes: int

    @property
    def kv_token_bytes(self) -> int:
        """Bytes of K and V that one token takes over all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.kv_bytes

    def flops(self, shape: Shape) -> float:
        """Floating-point operations of one forward (2 per multiply-add), attention included."""
        linear = 2.0 * self.linear_params * shape.tokens
        head = 2.0 * self.head_params * (shape.prefill_chunks + shape.decode_batch)
        attention = 4.0 * self.layers * self.heads * self.head_dim * (shape.prefill_pairs + shape.decode_context)
        return linear + head + attention

    def bytes(self, shape: Shape) -> float:
        """Bytes one forward must at least move: weights once, KV read and written."""
        read = shape.prefill_context + shape.decode_context
        return self.weight_bytes + self.kv_token_bytes * float(read + shape.tokens)
