"""What NVML tells of a GPU: facts, clocks, and who else uses it.

NVML comes with the driver, its Python binding with the package `nvidia-ml-py` (module `pynvml`). Both may be absent,
and in a container any call may be forbidden. Neither stops smpart: what cannot be read is left out, with its reason.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from smpart.errors import BackendUnavailable

_PACKAGE = "pip install 'nvidia-ml-py>=12.560' (smpart[cuda] contains it)"

_NO_SESSION = {
    4: "this user may not talk to the NVIDIA driver: check the permissions of /dev/nvidiactl and /dev/nvidia*",
    9: "the NVIDIA driver is not loaded: load its kernel module, `nvidia-smi` must work first",
    12: "libnvidia-ml.so.1 is missing: install the NVIDIA driver; a container needs NVIDIA_DRIVER_CAPABILITIES=utility",
    18: "the NVIDIA driver and libnvidia-ml.so.1 differ in version: reboot, or reload the kernel module",
}
"""Why no session starts, by `nvmlReturn_t`."""

_NO_VALUE = {
    2: "NVML knows no such GPU",
    3: "this GPU does not support it",
    4: "not permitted here",
    6: "NVML knows no such GPU",
    12: "the library that tells it is missing",
    13: "this driver's NVML lacks it",
    15: "the GPU is lost: it fell off the bus or is otherwise inaccessible",
    16: "the GPU needs a reset",
}
"""Why one value cannot be read, by `nvmlReturn_t`."""

_EVENTS = {
    0x002: "application clocks",
    0x004: "power cap",
    0x008: "hardware slowdown",
    0x010: "sync boost",
    0x020: "software thermal slowdown",
    0x040: "hardware thermal slowdown",
    0x080: "power brake",
    0x100: "display clocks",
    0x200: "board limit",
    0x400: "reliability",
}
"""What holds the clocks down, by bit (`nvmlClocksEventReason*`)."""

_IDLE = 0x001
_COMPUTE_MODES = {0: "default", 1: "exclusive thread", 2: "prohibited", 3: "exclusive process"}


@dataclass(frozen=True, slots=True)
class Clocks:
    """A GPU's speed at one moment; None where NVML does not tell.

    Attributes:
        sm_mhz: clock of the SMs.
        memory_mhz: clock of the device memory.
        temperature_c: of the chip, in degrees Celsius.
        throttled: what holds the clocks down, in words; empty if nothing does. That a GPU is idle does not count.
    """

    sm_mhz: int | None
    memory_mhz: int | None
    temperature_c: int | None
    throttled: tuple[str, ...] | None


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """A process with a context on a GPU.

    Attributes:
        pid: as the driver numbers it; seen from a container it may be the host's number.
        memory_bytes: device memory it holds; None where the driver does not tell.
    """

    pid: int
    memory_bytes: int | None


@contextmanager
def session() -> Iterator[Any]:
    """NVML, started while the block runs; the value is the module `pynvml`.

    NVML counts its sessions and only the first costs much: hold one around a loop of `clocks` to make each call cheap.

    Raises:
        BackendUnavailable: NVML is not to be had; the message says what would help.
    """
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        raise BackendUnavailable(f"nvidia-ml-py is missing: {_PACKAGE}") from None
    if not hasattr(nvml, "nvmlDeviceGetCurrentClocksEventReasons"):
        raise BackendUnavailable(f"the installed module pynvml is too old: {_PACKAGE}")
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        raise BackendUnavailable(_NO_SESSION.get(error.value, f"NVML does not start: {error}")) from None
    try:
        yield nvml
    finally:
        # A session that does not end (the driver was unloaded, the GPU is lost) leaves nothing one could still do.
        with suppress(nvml.NVMLError):
            nvml.nvmlShutdown()


def nvml_missing() -> str | None:
    """None if NVML works here; otherwise what is missing and what would help."""
    try:
        with session():
            return None
    except BackendUnavailable as error:
        return str(error)


def gpu_count() -> int:
    """GPUs that NVML sees. `CUDA_VISIBLE_DEVICES` does not change it.

    Raises:
        BackendUnavailable: NVML does not work here.
    """
    with session() as nvml, explained(nvml, "NVML cannot count GPUs"):
        return int(nvml.nvmlDeviceGetCount())


def device_facts(device: str | int) -> dict[str, object]:
    """What NVML knows of one GPU, ready for JSON. Never raises.

    Args:
        device: UUID as NVML, CUDA or torch write it (``GPU-...``, ``MIG-...`` or the bare number); or NVML's index,
            which counts all GPUs in PCI order, while CUDA's counts only visible ones: prefer the UUID.

    Returns:
        Those of these that could be read: ``name``, ``uuid``, ``driver_version``, ``cuda_version`` (the newest that the
        driver speaks), ``compute_capability``, ``memory_{total,used,free}_bytes``, ``memory_bus_bits``,
        ``memory_peak_bytes_per_s`` (from clock and bus, see `memory_peak`), ``mig``, ``compute_mode``, ``persistence``,
        ``sm_clock_mhz``, ``sm_clock_max_mhz``, ``memory_clock_mhz``, ``memory_clock_max_mhz``, ``temperature_c``,
        ``power_draw_w``, ``power_limit_w``, ``throttled`` (as in `Clocks`), ``pcie_generation``, ``pcie_width``, the
        same with ``_max`` (an idle link may run below it), ``ecc``, ``gpm`` (whether `Gpm` can measure it). And
        ``unavailable``: the reason of each that is absent; ``nvml`` or ``device`` alone where nothing could be read.
    """
    try:
        with session() as nvml:
            try:
                gpu = find(nvml, device)
            except BackendUnavailable as error:
                return {"unavailable": {"device": str(error)}}
            return _facts(nvml, gpu)
    except BackendUnavailable as error:
        return {"unavailable": {"nvml": str(error)}}


def clocks(device: str | int) -> Clocks:
    """Clocks and temperature now: four NVML calls, light enough to sample while measuring (see `session`).

    Raises:
        BackendUnavailable: NVML does not work here or knows no such GPU.
    """
    with session() as nvml:
        gpu = find(nvml, device)

        def value(read: Callable[[Any, Any], Any]) -> Any:
            with suppress(nvml.NVMLError):
                return read(nvml, gpu)
            return None

        return Clocks(value(_sm_clock), value(_memory_clock), value(_temperature), value(_throttled))


def processes(device: str | int) -> tuple[GpuProcess, ...]:
    """Processes that have a context on a GPU, for computing, through MPS or for graphics, by pid.

    Raises:
        BackendUnavailable: NVML does not work here, knows no such GPU, or may not tell who uses it.
    """
    with session() as nvml:
        gpu = find(nvml, device)
        # The unversioned names raise something that is no NVMLError where the driver is older than v3.
        with explained(nvml, f"GPU {device}: who uses it is unknown"):
            found = list(nvml.nvmlDeviceGetComputeRunningProcesses_v3(gpu))
        for more in (nvml.nvmlDeviceGetMPSComputeRunningProcesses_v3, nvml.nvmlDeviceGetGraphicsRunningProcesses_v3):
            with suppress(nvml.NVMLError):  # not every GPU has these; the list above is the one that matters
                found += more(gpu)
    held: dict[int, int | None] = {}
    for each in found:  # a client of MPS is in two lists
        held[each.pid] = max((m for m in (held.get(each.pid), each.usedGpuMemory) if m is not None), default=None)
    return tuple(GpuProcess(pid, held[pid]) for pid in sorted(held))


def find(nvml: Any, device: str | int) -> Any:
    """NVML's handle of a GPU, valid within the session. See `device_facts` for ``device``.

    Raises:
        BackendUnavailable: no such GPU, or it may not be used.
    """
    with explained(nvml, f"GPU {device}"):
        if isinstance(device, int):
            return nvml.nvmlDeviceGetHandleByIndex(device)
        uuid = device if device.startswith(("GPU-", "MIG-")) else f"GPU-{device}"
        return nvml.nvmlDeviceGetHandleByUUID(uuid)


@contextmanager
def explained(nvml: Any, what: str) -> Iterator[None]:
    """Raise NVML's errors as `BackendUnavailable`, with what was tried and why it failed."""
    try:
        yield
    except nvml.NVMLError as error:
        raise BackendUnavailable(f"{what}: {reason(error)}") from None


def reason(error: Any) -> str:
    """An `NVMLError` in words."""
    return _NO_VALUE.get(error.value) or f"NVML says {str(error).rstrip('.')} ({error.value})"


def memory_peak(nvml: Any, gpu: Any) -> int:
    """Peak bandwidth of the device memory in bytes/s: two transfers a clock over the whole bus.

    NVML tells no bandwidth. The same product of clock and bus width is what CUDA's samples print as the peak.
    """
    clock = nvml.nvmlDeviceGetMaxClockInfo(gpu, nvml.NVML_CLOCK_MEM)
    return int(2 * clock * 1_000_000 * nvml.nvmlDeviceGetMemoryBusWidth(gpu) // 8)


def _facts(nvml: Any, gpu: Any) -> dict[str, object]:
    facts: dict[str, object] = {}
    unavailable: dict[str, str] = {}
    for names, read in _READERS.items():
        try:
            values = read(nvml, gpu)
        except nvml.NVMLError as error:
            unavailable |= dict.fromkeys(names, reason(error))
        else:
            facts |= zip(names, values if len(names) > 1 else (values,), strict=True)
    return facts | {"unavailable": unavailable}


def _sm_clock(nvml: Any, gpu: Any) -> int:
    return int(nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM))


def _memory_clock(nvml: Any, gpu: Any) -> int:
    return int(nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_MEM))


def _temperature(nvml: Any, gpu: Any) -> int:
    return int(nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU))


def _throttled(nvml: Any, gpu: Any) -> tuple[str, ...]:
    bits = nvml.nvmlDeviceGetCurrentClocksEventReasons(gpu) & ~_IDLE
    return tuple(_EVENTS.get(1 << i, f"reason {1 << i:#x}") for i in range(64) if bits >> i & 1)


def _memory(nvml: Any, gpu: Any) -> tuple[int, int, int]:
    memory = nvml.nvmlDeviceGetMemoryInfo(gpu)
    return memory.total, memory.used, memory.free


def _cuda_version(nvml: Any, _gpu: Any) -> str:
    version = nvml.nvmlSystemGetCudaDriverVersion_v2()
    return f"{version // 1000}.{version % 1000 // 10}"


def _compute_mode(nvml: Any, gpu: Any) -> str:
    mode = nvml.nvmlDeviceGetComputeMode(gpu)
    return _COMPUTE_MODES.get(mode, f"mode {mode}")


_READERS: Mapping[tuple[str, ...], Callable[[Any, Any], Any]] = {
    ("name",): lambda nvml, gpu: nvml.nvmlDeviceGetName(gpu),
    ("uuid",): lambda nvml, gpu: nvml.nvmlDeviceGetUUID(gpu),
    ("driver_version",): lambda nvml, _gpu: nvml.nvmlSystemGetDriverVersion(),
    ("cuda_version",): _cuda_version,
    ("compute_capability",): lambda nvml, gpu: "{}.{}".format(*nvml.nvmlDeviceGetCudaComputeCapability(gpu)),
    ("memory_total_bytes", "memory_used_bytes", "memory_free_bytes"): _memory,
    ("memory_bus_bits",): lambda nvml, gpu: nvml.nvmlDeviceGetMemoryBusWidth(gpu),
    ("memory_peak_bytes_per_s",): memory_peak,
    ("mig",): lambda nvml, gpu: bool(nvml.nvmlDeviceGetMigMode(gpu)[0]),
    ("compute_mode",): _compute_mode,
    ("persistence",): lambda nvml, gpu: bool(nvml.nvmlDeviceGetPersistenceMode(gpu)),
    ("sm_clock_mhz",): _sm_clock,
    ("sm_clock_max_mhz",): lambda nvml, gpu: nvml.nvmlDeviceGetMaxClockInfo(gpu, nvml.NVML_CLOCK_SM),
    ("memory_clock_mhz",): _memory_clock,
    ("memory_clock_max_mhz",): lambda nvml, gpu: nvml.nvmlDeviceGetMaxClockInfo(gpu, nvml.NVML_CLOCK_MEM),
    ("temperature_c",): _temperature,
    ("power_draw_w",): lambda nvml, gpu: nvml.nvmlDeviceGetPowerUsage(gpu) / 1e3,
    ("power_limit_w",): lambda nvml, gpu: nvml.nvmlDeviceGetEnforcedPowerLimit(gpu) / 1e3,
    ("throttled",): lambda nvml, gpu: list(_throttled(nvml, gpu)),
    ("pcie_generation",): lambda nvml, gpu: nvml.nvmlDeviceGetCurrPcieLinkGeneration(gpu),
    ("pcie_generation_max",): lambda nvml, gpu: nvml.nvmlDeviceGetMaxPcieLinkGeneration(gpu),
    ("pcie_width",): lambda nvml, gpu: nvml.nvmlDeviceGetCurrPcieLinkWidth(gpu),
    ("pcie_width_max",): lambda nvml, gpu: nvml.nvmlDeviceGetMaxPcieLinkWidth(gpu),
    ("ecc",): lambda nvml, gpu: bool(nvml.nvmlDeviceGetEccMode(gpu)[0]),
    ("gpm",): lambda nvml, gpu: bool(nvml.nvmlGpmQueryDeviceSupport(gpu).isSupportedDevice),
}
"""How each fact is read: names, and a function of `pynvml` and a handle that gives one value a name."""
