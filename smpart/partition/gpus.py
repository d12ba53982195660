"""What GPUs are made of, as far as cutting them up goes: SMs, memory, and the sizes of group the hardware allows.

SM counts and memory are those of NVIDIA's data sheets and architecture whitepapers (A100 80GB SXM, H100 SXM5,
H200 SXM, Ada AD102). The group sizes are the CUDA driver API's rules for green contexts by compute capability.
"""

from __future__ import annotations

from dataclasses import dataclass

from smpart.partition.feasible import feasible_splits
from smpart.partition.split import Split


@dataclass(frozen=True, slots=True)
class GpuUnits:
    """A GPU's units.

    Attributes:
        capability: CUDA compute capability.
    """

    sms: int
    capability: tuple[int, int]
    memory_bytes: int

    def splits(self) -> tuple[Split, ...]:
        """Every split the hardware allows, as far as the counts tell."""
        minimum, step = sm_group(self.capability)
        return feasible_splits(self.sms, minimum, step)


def sm_group(capability: tuple[int, int]) -> tuple[int, int]:
    """Smallest group of SMs and the step of larger ones.

    >>> sm_group((9, 0)), sm_group((8, 9))
    ((8, 8), (4, 2))
    """
    major = capability[0]
    return (8, 8) if major >= 9 else (4, 2) if major == 8 else (2, 2)


GPUS: dict[str, GpuUnits] = {
    "a100": GpuUnits(sms=108, capability=(8, 0), memory_bytes=80 * 10**9),
    "h100": GpuUnits(sms=132, capability=(9, 0), memory_bytes=80 * 10**9),
    "h200": GpuUnits(sms=132, capability=(9, 0), memory_bytes=141 * 10**9),
    "rtx4090": GpuUnits(sms=128, capability=(8, 9), memory_bytes=24 * 10**9),
}
