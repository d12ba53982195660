"""Builds and drives the fake NVML of `libnvml/`.

    fake = load()                        # compiled once, kept in .cache/
    fake.reset("h200", driver="580.159.03")
    with fake.served():                  # `import pynvml` finds the fake and nothing else, until the block ends
        ...
    assert fake.misuse() == [] and not any(fake.live().values())

The library carries no soname and is loaded by its path, so that nothing else in the process ever takes it for the real
one. A process of its own may instead find it by name: put the folder of `build()` into its LD_LIBRARY_PATH.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import ModuleType

_SOURCES = Path(__file__).parent / "libnvml"
_CACHE = Path(__file__).parents[2] / ".cache" / "fakes"
_LISTS = {"compute": 0, "mps": 1, "graphics": 2}
_METRICS = {"sm_active": 2, "sm_occupancy": 3, "tensor_active": 5, "dram_bandwidth": 10}
_MIB = 1 << 20

UNSUPPORTED = -1
NOT_SUPPORTED, NO_PERMISSION, FUNCTION_NOT_FOUND = 3, 4, 13
DRIVER_NOT_LOADED, GPU_IS_LOST, LIB_RM_VERSION_MISMATCH, UNKNOWN = 9, 15, 18, 999


@dataclass(frozen=True)
class Gpu:
    """A GPU as it sits idle. Flags take 0, 1 or UNSUPPORTED."""

    name: str
    major: int
    minor: int
    memory_mib: int
    sm_max_mhz: int
    memory_max_mhz: int
    bus_bits: int
    power_limit_mw: int
    pcie_generation_max: int
    mig: int = 0
    ecc: int = 1
    gpm: int = 1
    uuid: str = ""
    used_mib: int = 500
    compute_mode: int = 0
    persistence: int = 1
    sm_mhz: int = 345
    memory_mhz: int = 0
    temperature_c: int = 31
    power_mw: int = 75_500
    event_reasons: int = 0x1
    pcie_generation: int = 1
    pcie_width: int = 16
    pcie_width_max: int = 16


GPUS = {
    "a100": Gpu("NVIDIA A100-SXM4-80GB", 8, 0, 81920, 1410, 1593, 5120, 400_000, 4, gpm=0),
    "h100": Gpu("NVIDIA H100 80GB HBM3", 9, 0, 81559, 1980, 2619, 5120, 700_000, 5),
    "h200": Gpu("NVIDIA H200", 9, 0, 143771, 1980, 3201, 6144, 700_000, 5),
    "b200": Gpu("NVIDIA B200", 10, 0, 183359, 1965, 3996, 7680, 1_000_000, 5),
    "rtx4090": Gpu("NVIDIA GeForce RTX 4090", 8, 9, 24564, 3105, 10501, 384, 450_000, 4, UNSUPPORTED, 0, 0),
}
"""Generations that differ in what they can do. The figures are only inputs of tests."""


class _Description(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char * 96),
        ("uuid", ctypes.c_char * 80),
        *((name, ctypes.c_int) for name in ("major", "minor")),
        *((name, ctypes.c_ulonglong) for name in ("total_bytes", "used_bytes")),
        *((name, ctypes.c_int) for name in ("mig", "compute_mode", "persistence", "ecc", "gpm")),
        *((name, ctypes.c_int) for name in ("sm_mhz", "sm_max_mhz", "memory_mhz", "memory_max_mhz", "bus_bits")),
        *((name, ctypes.c_int) for name in ("temperature_c", "power_mw", "power_limit_mw")),
        ("event_reasons", ctypes.c_ulonglong),
        *((f"pcie_{name}", ctypes.c_int) for name in ("generation", "generation_max", "width", "width_max")),
    )


def missing() -> str | None:
    """Why the fake cannot be built here; None if it can."""
    if shutil.which("gcc") is None:
        return "the fake NVML needs gcc"
    return None if _header() else "the fake NVML needs nvml.h: pip install nvidia-nvml-dev"


@functools.cache
def build(without: tuple[str, ...] = ()) -> Path:
    """The library, compiled unless it has been before. An older driver's lacks the functions ``without``."""
    sources, header = sorted(_SOURCES.glob("*.[ch]")), _header()
    assert header is not None
    key = hashlib.sha256(repr(without).encode())
    for path in (*sources, header):
        key.update(path.read_bytes())
    library = _CACHE / f"libnvml-{key.hexdigest()[:16]}" / "libnvidia-ml.so.1"
    if library.exists():
        return library
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        hidden = Path(folder, "hidden.map")
        hidden.write_text(f"{{ local: {' '.join(f'{name};' for name in (*without, 'none'))} }};")
        made = Path(folder, "made")
        command = ["gcc", "-std=c11", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", f"-I{header.parent}"]
        command += [f"-Wl,--version-script={hidden}", *(str(path) for path in sources if path.suffix == ".c")]
        subprocess.run([*command, "-o", str(made), "-lm", "-lpthread"], check=True)
        made.replace(library)
    return library


def load(without: tuple[str, ...] = ()) -> FakeNvml:
    """The library, loaded into this process by its path."""
    return FakeNvml(ctypes.CDLL(str(build(without))))


class FakeNvml:
    """The test's side of the loaded library. One driver a process, like the real one: `reset` forgets the last."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        for text in (library.fake_calls, library.fake_misuse):
            text.restype = ctypes.c_char_p
        library.fake_clock.restype = ctypes.c_double

    def reset(self, *gpus: str | Gpu, driver: str = "580.159.03", cuda: str = "13.0") -> None:
        """A machine with these GPUs, in this order; every session, sample, fault and record is forgotten."""
        known = [GPUS[gpu] if isinstance(gpu, str) else gpu for gpu in gpus]
        described = (_Description * max(1, len(known)))(*(_describe(i, gpu) for i, gpu in enumerate(known)))
        major, minor = cuda.split(".")
        self._library.fake_reset(driver.encode(), int(major) * 1000 + int(minor) * 10, described, len(known))

    def fail(self, what: str, code: int, *, nth: int = 1, forever: bool = False) -> None:
        """Let the nth call from now of a function fail (``forever``: all from then on); or ``metric 10`` of GPM."""
        self._library.fake_fail(what.encode(), nth, code, forever)

    def process(self, pid: int, size: int, kind: str = "compute", gpu: int = 0) -> None:
        """Let a process hold ``size`` bytes on a GPU; ``kind`` is compute, mps or graphics; -1: NVML may not tell."""
        self._library.fake_process(gpu, _LISTS[kind], pid, ctypes.c_ulonglong(size))

    def run(self, seconds: float, gpu: int = 0, **percent: float) -> None:
        """Let time pass with the GPU this busy, by the names that `Activity` has."""
        count = len(percent)
        metrics = (ctypes.c_int * max(1, count))(*(_METRICS[name] for name in percent))
        values = (ctypes.c_double * max(1, count))(*percent.values())
        self._library.fake_run(gpu, ctypes.c_double(seconds), metrics, values, count)

    def clock(self) -> float:
        """Seconds that have passed by `run`."""
        return float(self._library.fake_clock())

    def calls(self) -> list[str]:
        """Names of all functions called since the reset."""
        return self._library.fake_calls().decode().splitlines()

    def misuse(self) -> list[str]:
        """Every rule of NVML that was broken since the reset."""
        return self._library.fake_misuse().decode().splitlines()

    def live(self) -> dict[str, int]:
        """What is open: sessions and GPM samples."""
        return {"sessions": self._library.fake_sessions(), "samples": self._library.fake_samples()}

    @contextmanager
    def served(self) -> Iterator[ModuleType]:
        """A fresh `pynvml` that loads this library; the process's own, if any, is back afterwards."""
        with fresh_pynvml() as pynvml:
            pynvml.CDLL = self._find
            yield pynvml

    def _find(self, name: str) -> ctypes.CDLL:
        assert name == "libnvidia-ml.so.1"
        return self._library


@contextmanager
def fresh_pynvml() -> Iterator[ModuleType]:
    """A `pynvml` that has loaded no library yet, in place of the process's own while the block runs."""
    own = sys.modules.pop("pynvml", None)
    try:
        yield importlib.import_module("pynvml")
    finally:
        sys.modules.pop("pynvml", None)
        if own is not None:
            sys.modules["pynvml"] = own


def uuid(index: int) -> str:
    """UUID of the GPU at an index, unless its `Gpu` names another."""
    return f"GPU-{index:08x}-0000-4000-8000-00000000feed"


def _describe(index: int, gpu: Gpu) -> _Description:
    gpu = replace(gpu, uuid=gpu.uuid or uuid(index), memory_mhz=gpu.memory_mhz or gpu.memory_max_mhz)
    values = {field.name: getattr(gpu, field.name) for field in fields(gpu) if not field.name.endswith("_mib")}
    values |= {"name": gpu.name.encode(), "uuid": gpu.uuid.encode()}
    return _Description(**values, total_bytes=gpu.memory_mib * _MIB, used_bytes=gpu.used_mib * _MIB)


def _header() -> Path | None:
    """nvml.h of the wheel nvidia-nvml-dev, or of the CUDA toolkit."""
    places = [*(Path(entry, "nvidia", "cu13", "include") for entry in sys.path if entry)]
    places += [Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "include")]
    return next((place / "nvml.h" for place in places if (place / "nvml.h").exists()), None)
