"""A contender: a payload that is no forward, but a kernel that loads one resource of the device for a while."""

from __future__ import annotations

from dataclasses import dataclass

KINDS = ("arithmetic", "arithmetic:50", "dram", "dram:50", "dram:25", "l2")
"""What is loaded, and in what percentage of the time (100 without a number)."""


@dataclass(frozen=True, slots=True)
class Contender:
    """Payload of one launch, for lanes on a CUDA device.

    Attributes:
        kind: one of `KINDS`.
        bursts: how long it lasts, in bursts of the kernel.
    """

    kind: str
    bursts: int


@dataclass(frozen=True, slots=True)
class Pressed:
    """What one launch did: bytes of memory moved, and floating-point operations."""

    bytes: float
    flops: float
