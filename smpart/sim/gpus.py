"""Peak rates of GPUs, by the names that backend `sim` knows.

NVIDIA data sheets, dense (no sparsity): A100 80GB SXM (312 TFLOP/s bf16, 2039 GB/s), H100 SXM5 (989.4 TFLOP/s,
3.35 TB/s), H200 SXM (989.4 TFLOP/s, 4.8 TB/s); Ada architecture whitepaper, GeForce RTX 4090 (165.2 TFLOP/s bf16 with
fp32 accumulation, 1008 GB/s).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Peaks:
    """What a whole device can do at best.

    Attributes:
        flops: dense bf16 floating-point operations a second.
        bandwidth: bytes a second from device memory.
    """

    flops: float
    bandwidth: float


PEAKS: dict[str, Peaks] = {
    "a100": Peaks(flops=312.0e12, bandwidth=2.039e12),
    "h100": Peaks(flops=989.4e12, bandwidth=3.35e12),
    "h200": Peaks(flops=989.4e12, bandwidth=4.8e12),
    "rtx4090": Peaks(flops=165.2e12, bandwidth=1.008e12),
}
