"""What a forward's kernels take on a whole GPU without a neighbour, and what they do meanwhile."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from smpart.partition import Shape


class Part(NamedTuple):
    """Kernels of one kind in a forward, all layers together.

    Attributes:
        seconds: on all SMs, alone.
        flops: floating-point operations that this takes.
        bytes: bytes that this must at least move to or from device memory.
    """

    seconds: float
    flops: float
    bytes: float


class Kernels(Protocol):
    """Measured kernels of one model on one GPU."""

    def parts(self, shape: Shape) -> tuple[Part, ...]:
        """The kernels of a forward by kind, in any order; their times add up."""
        ...
