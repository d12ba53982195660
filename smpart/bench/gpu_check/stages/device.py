"""What the device is, and what runs on it."""

from __future__ import annotations

from smpart.bench.gpu_check.record import Figures, Record, Setting
from smpart.bench.host import host, versions
from smpart.errors import BackendUnavailable
from smpart.partition.cuda.driver import driver, why_no_driver
from smpart.partition.cuda.gpu import Gpu
from smpart.partition.cuda.nvml import clocks, device_facts
from smpart.partition.cuda.resources import device_resource

_PACKAGES = (
    *("smpart", "torch", "triton", "transformers", "numpy", "scipy", "scikit-learn", "greenlet", "safetensors"),
    *("cuda-bindings", "cuda-core", "cupy-cuda13x", "nvidia-ml-py", "nvidia-cuda-nvrtc", "flashinfer-python", "pytest"),
)


def measure(setting: Setting, record: Record) -> None:
    """Name, driver, SMs, versions; ``missing`` says why there is no GPU."""
    missing = why_no_driver()
    record.put(missing=missing)
    if missing is not None:
        return
    api = driver()
    gpu = Gpu.find(api)
    sm = device_resource(api, gpu.handle).sm
    device = gpu.device(api)
    record.put(
        device={
            "name": device.name,
            "sms": device.units,
            "memory_gib": round(device.memory_bytes / 2**30, 1),
            **dict(device.facts),
            "granularity_by_driver": [int(sm.minSmPartitionSize), int(sm.smCoscheduledAlignment)],
        },
        driver=f"{api.version[0]}.{api.version[1]}",
        versions=versions(_PACKAGES),
        host=host(),
        nvml=_nvml(),
    )


def _nvml() -> Figures:
    try:
        return device_facts(0)
    except BackendUnavailable as error:
        return {"missing": str(error)}


def clocks_now() -> Figures:
    """SM and memory clock in MHz, temperature, and what holds the clocks down; or why they are not known."""
    try:
        now = clocks(0)
    except BackendUnavailable as error:
        return {"unknown": str(error)}
    return {name: getattr(now, name) for name in now.__slots__}
