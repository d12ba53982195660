"""What joins two GPUs of a kind, by the names that backend `sim` knows.

NVIDIA data sheets, one direction of what they state for both: NVLink of an A100 300 GB/s, of an H100 or H200 450 GB/s.
A GeForce RTX 4090 has none: PCIe 4.0 x16, 32 GB/s.
"""

from __future__ import annotations

from smpart.partition.link import Link

REACHED = 0.8
"""Share of the stated rate at which large copies go through. Assumed."""

LATENCY_S = 100e-6
"""Setting one request's transfer up and telling the other side. Assumed."""

LINKS: dict[str, Link] = {
    gpu: Link(REACHED * rate, LATENCY_S)
    for gpu, rate in {"a100": 300e9, "h100": 450e9, "h200": 450e9, "rtx4090": 32e9}.items()
}
