"""What a forward's kernels take on a whole GPU without a neighbour, and what they do meanwhile."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from smpart.partition import Shape

TILE = 128
"""Rows and columns of an output tile of a matmul; the usual size on these GPUs."""


class Part(NamedTuple):
    """Kernels of one kind in a forward, all layers together.

    Attributes:
        seconds: on all SMs, alone.
        flops: floating-point operations that this takes.
        bytes: bytes that this must at least move to or from device memory.
        tiles: pieces of equal work that one of its kernels hands to the SMs; 0: not known, or not by SMs at all.
    """

    seconds: float
    flops: float
    bytes: float
    tiles: float = 0.0


class Kernels(Protocol):
    """Measured kernels of one model on one GPU. Times of all kinds add up to a forward's."""

    def layers(self, tokens: int) -> tuple[Part, ...]:
        """What depends on the number of tokens alone: matmuls, elementwise kernels, communication."""
        ...

    def head(self, sampled: int) -> tuple[Part, ...]:
        """What depends on the number of sampled positions alone."""
        ...

    def attention(self, shape: Shape) -> Part:
        """Attention of all layers, prompts and decodes."""
        ...
