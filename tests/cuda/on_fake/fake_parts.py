"""A device for `DeviceArgs.parts` whose driver is the fake one, and whose kernels run on torch's CPU when queued."""

from __future__ import annotations

import os

import fake_cuda
import torch
from device_rig import CpuQueue

from smpart.partition import Side
from smpart.partition.cuda.driver import driver
from smpart.partition.green import Green
from smpart.runtime.device.machine import DeviceArgs, Parts

PARTS = "fake_parts:open_parts"


def open_parts(args: DeviceArgs) -> Parts:
    """An H200, in a process of its own."""
    fake_cuda.load(os.environ.get("FAKE_DRIVER", "13.0"))
    return open_here(args)


def open_here(args: DeviceArgs) -> Parts:
    """The device that this process's fake driver plays."""
    places = Green().open()

    def queue(side: Side) -> CpuQueue:
        return CpuQueue()

    cpu, notes = torch.device("cpu"), {"lanes": str(places)}
    return Parts(driver(), Green().device(), places, cpu, queue, lambda: 64 << 20, places.close, notes)


def open_none(args: DeviceArgs) -> Parts:
    """A device that cannot be opened."""
    raise RuntimeError("no device today")
