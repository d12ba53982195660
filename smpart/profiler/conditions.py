"""The state of the GPU beside each sample: clocks, temperature and power, where NVML tells."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from smpart.errors import BackendUnavailable
from smpart.partition import Device
from smpart.partition.cuda import nvml
from smpart.profiler.sample import Conditions

_log = logging.getLogger(__name__)


@contextmanager
def watched(device: Device) -> Iterator[Callable[[], Conditions]]:
    """A function that reads a device's conditions now, while the block runs.

    One session of NVML is held open, so that a call costs some reads and no start. It never raises: what cannot be
    read is None, and all is None where the device is no GPU or NVML does not work (which is logged, once).

        with watched(lanes.device) as conditions:
            before = conditions()
    """
    with ExitStack() as stack:
        yield _reader(stack, device)


def _reader(stack: ExitStack, device: Device) -> Callable[[], Conditions]:
    uuid = device.facts.get("uuid")
    if device.kind != "cuda" or not isinstance(uuid, str):
        return Conditions
    try:
        module = stack.enter_context(nvml.session())
        nvml.find(module, uuid)
    except BackendUnavailable as error:
        _log.info("samples are stored without clocks and temperature: %s", error)
        return Conditions
    return lambda: _read(module, uuid)


def _read(module: Any, uuid: str) -> Conditions:
    try:
        clocks = nvml.clocks(uuid)
        watts = _watts(module, uuid)
    except BackendUnavailable:  # the GPU was lost: the lanes will say so
        return Conditions()
    return Conditions(
        sm_mhz=_float(clocks.sm_mhz),
        memory_mhz=_float(clocks.memory_mhz),
        celsius=_float(clocks.temperature_c),
        watts=watts,
    )


def _watts(module: Any, uuid: str) -> float | None:
    gpu = nvml.find(module, uuid)
    try:
        return float(module.nvmlDeviceGetPowerUsage(gpu)) / 1e3
    except module.NVMLError:
        return None


def _float(value: int | None) -> float | None:
    return None if value is None else float(value)
