"""The kernels' sources on a CPU: built by g++ over csrc/host_shim.h, and run on the small GPU which that plays."""

import ctypes
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

CSRC = Path(__file__).resolve().parents[2] / "csrc"
KERNELS = ("probe", "meet", "arithmetic", "memory", "gather", "scatter")
SM_SHARED = 228 * 1024
"""Bytes of shared memory of an SM, as on an H100."""

# Beside the kernels: a neighbour that raises a flag after a while, and the small floats on their own.
_EXTRA = """
extern "C" void raise_flag(int* flag, unsigned long long after_ns) {
    const unsigned long long began = now_ns();
    while (now_ns() - began < after_ns) {
    }
    *flag = 1;
}
SHIM_KERNEL(raise_flag)
extern "C" void encode_float8(const float* from, unsigned char* to, long long count) {
    for (long long i = 0; i < count; ++i) to[i] = Float8::encode(from[i]);
}
extern "C" void decode_float8(const unsigned char* from, float* to, long long count) {
    for (long long i = 0; i < count; ++i) to[i] = Float8::decode(from[i]);
}
"""


class HostGpu:
    """The device that host_shim.h plays. One at a time: it is the library's only state."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        self._library_run = library.shim_run
        self._library_run.restype = ctypes.c_longlong
        self._alive: list[Any] = []

    def device(self, sms: int, tick: int = 100, time_slice: int = 0, threads: int = 2048) -> None:
        """A fresh device. `tick`: ns that pass in a round of all threads; `time_slice`: ns of each launch's turn."""
        self._alive.clear()
        self.library.shim_device(
            sms, ctypes.c_size_t(SM_SHARED), threads, ctypes.c_ulonglong(tick), ctypes.c_ulonglong(time_slice)
        )

    def queue(
        self,
        kernel: str,
        grid: int,
        block: int,
        args: Sequence[np.ndarray[Any, Any] | np.generic],
        sms: Iterable[int],
        stream: int = 0,
        shared: int = 0,
    ) -> None:
        """Queue a launch; arrays go by address, numpy scalars by value. It runs in `run`."""
        allowed = np.array(sorted(sms), np.int32)
        cells = [
            np.array([arg.ctypes.data], np.uint64) if isinstance(arg, np.ndarray) else np.array([arg], arg.dtype)
            for arg in args
        ]
        pointers = (ctypes.c_void_p * len(cells))(*(cell.ctypes.data for cell in cells))
        self._alive += [args, cells]
        getattr(self.library, f"queue_{kernel}")(
            pointers, grid, block, ctypes.c_size_t(shared), stream, ctypes.c_void_p(allowed.ctypes.data), len(allowed)
        )

    def run(self) -> int:
        """Run all that is queued. Returns the ns that passed on the device."""
        took = int(self._library_run())
        assert took >= 0, "a block fits on no SM of its stream"
        return took


@pytest.fixture(scope="session")
def shim_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All kernels in one shared library that aborts on undefined behaviour (misaligned vectors, overflows)."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++")
    folder = tmp_path_factory.mktemp("shim")
    text = [f'#include "{path.name}"' for path in sorted(CSRC.glob("*.cu"))]
    text += [f"SHIM_KERNEL({kernel})" for kernel in KERNELS]
    (folder / "kernels.cpp").write_text("\n".join(text) + _EXTRA)
    warnings = ["-Wall", "-Wextra", "-Werror"]
    checks = ["-fsanitize=undefined", "-fno-sanitize-recover=undefined"]
    # As on the GPU: no fused multiply-add where the source has none; vectors are read where elements were written.
    meaning = ["-std=c++17", "-O1", "-ffp-contract=off", "-fno-strict-aliasing"]
    output = folder / "libkernels.so"
    subprocess.run(
        [compiler, *meaning, *warnings, *checks, "-shared", "-fPIC", f"-I{CSRC}", "-o", output, folder / "kernels.cpp"],
        check=True,
    )
    return output


@pytest.fixture(scope="session")
def host_gpu(shim_library: Path) -> HostGpu:
    return HostGpu(ctypes.CDLL(str(shim_library)))
