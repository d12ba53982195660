"""What forwards are kept apart by: kind, units, coarse size, packed into one integer."""

from __future__ import annotations

from smpart.partition import Shape

HYBRID = 3
"""The phase of a hybrid step in a kind."""


def kind_of(shape: Shape, neighbour: Shape) -> int:
    """Four times the phase of a forward, and the phase of its neighbour."""
    kind = (4 if shape.prefill_tokens else 0) + (8 if shape.decode_batch else 0)
    return kind + (1 if neighbour.prefill_tokens else 0) + (2 if neighbour.decode_batch else 0)


def solo_key(shape: Shape, units: int) -> int:
    """Units and coarse size (powers of two of tokens, batch, and of four of the context a sequence has); even."""
    tokens, batch = shape.prefill_tokens, shape.decode_batch
    context = shape.decode_context // batch if batch else 0
    if tokens:
        context += shape.prefill_context // (shape.prefill_chunks or 1)
    key = (units << 6 | tokens.bit_length()) << 6 | batch.bit_length()
    return (key << 5 | context.bit_length() >> 1) << 1


def beside_key(shape: Shape, units: int, neighbour: Shape) -> int:
    """Units, phases, and the powers of two of both sides' tokens; odd."""
    tokens, batch = shape.prefill_tokens, shape.decode_batch
    others, rows = neighbour.prefill_tokens, neighbour.decode_batch
    phases = (1 if tokens else 0) | (2 if batch else 0) | (4 if others else 0) | (8 if rows else 0)
    return ((units << 6 | (tokens + batch).bit_length()) << 6 | (others + rows).bit_length()) << 5 | phases << 1 | 1
