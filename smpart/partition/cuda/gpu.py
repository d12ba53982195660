"""One NVIDIA device as the driver describes it; asking takes no context and no memory."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import Any

from smpart.partition.cuda.driver import Driver
from smpart.partition.cuda.resources import granularity
from smpart.partition.device import Device
from smpart.partition.feasible import feasible_splits
from smpart.partition.split import Split

_MOST_SPLITS = 18
"""Splits with two sides that are made by default at most: each takes two contexts."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """A device.

    Attributes:
        handle: its `CUdevice`.
        units: SMs.
        minimum, step: SMs are handed out in groups of at least `minimum`, in steps of `step`.
        capability: compute capability, for example (9, 0).
        memory_bytes: its whole memory.
    """

    handle: Any
    name: str
    uuid: str
    units: int
    minimum: int
    step: int
    capability: tuple[int, int]
    memory_bytes: int

    @classmethod
    def find(cls, api: Driver, ordinal: int = 0) -> Gpu:
        """The visible device of this number. Raises `CudaError`."""
        handle = api("cuDeviceGet", ordinal)
        attributes = api.api.CUdevice_attribute
        major = api("cuDeviceGetAttribute", attributes.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, handle)
        minor = api("cuDeviceGetAttribute", attributes.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, handle)
        sms = granularity(api, handle, (major, minor))
        return cls(
            handle=handle,
            name=api("cuDeviceGetName", 256, handle).split(b"\0")[0].decode(),
            uuid=f"GPU-{uuid.UUID(bytes=bytes(api('cuDeviceGetUuid', handle).bytes))}",
            units=sms.units,
            minimum=sms.minimum,
            step=sms.step,
            capability=(major, minor),
            memory_bytes=api("cuDeviceTotalMem", handle),
        )

    @property
    def lane_step(self) -> int:
        """The finest step of splits that is worth its contexts."""
        step = self.step
        while len(feasible_splits(self.units, self.minimum, step)) - 2 > _MOST_SPLITS:
            step += self.step
        return step

    def splits(self, step: int | None = None) -> tuple[Split, ...]:
        """Those whose prefill side is a multiple of `step` (None: of `lane_step`), and the two exclusive ones."""
        chosen = step or self.lane_step
        every = feasible_splits(self.units, self.minimum, self.step)
        return tuple(split for split in every if split.exclusive or split.prefill % chosen == 0)

    def device(self, api: Driver) -> Device:
        """The same for the rest of the house. Its unit ids are positions, not the hardware's own numbers."""
        facts = {
            "uuid": self.uuid,
            "compute_capability": f"{self.capability[0]}.{self.capability[1]}",
            "driver_cuda": f"{api.version[0]}.{api.version[1]}",
            "sm_minimum": self.minimum,
            "sm_step": self.step,
        }
        return Device(self.name, "cuda", self.units, tuple(range(self.units)), self.memory_bytes, facts)
