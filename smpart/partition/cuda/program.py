"""Kernels of ``csrc``, loaded and launched through the driver alone, on places of either side."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from smpart.kernels import compiled
from smpart.partition.cuda.driver import Driver
from smpart.partition.cuda.gpu import Gpu
from smpart.partition.cuda.places import Place

Argument = tuple[Any, Any]
"""A ctypes type and its value."""


def pointer(address: int) -> Argument:
    """An address on the device."""
    return ctypes.c_void_p, address


def int32(value: int) -> Argument:
    """A C ``int``."""
    return ctypes.c_int32, value


def int64(value: int) -> Argument:
    """A C ``long long``."""
    return ctypes.c_int64, value


def uint64(value: int) -> Argument:
    """A C ``unsigned long long``."""
    return ctypes.c_uint64, value


class Program:
    """Kernels and device memory, given back when it is closed. The device must be idle then.

    Args:
        primary: the device's primary context.

    Attributes:
        most_shared: bytes of dynamic shared memory that a block may have: more than half of what an SM has.
    """

    def __init__(self, api: Driver, gpu: Gpu, primary: Any) -> None:
        self.api, self.gpu = api, gpu
        self._primary = primary
        self._undo = contextlib.ExitStack()
        self._libraries: dict[str, Any] = {}
        name = api.api.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
        self.most_shared = int(api("cuDeviceGetAttribute", name, gpu.handle))

    def kernel(self, source: str, name: str, shared: int = 0) -> Any:
        """A kernel whose blocks may have `shared` bytes of dynamic shared memory. Raises `CudaError`."""
        if source not in self._libraries:
            major, minor = self.gpu.capability
            binary = compiled(source, f"sm_{major}{minor}").read_bytes()
            with self.api.current(self._primary):
                library = self.api("cuLibraryLoadData", binary, [], [], 0, [], [], 0)
            self._libraries[source] = library
            self._undo.callback(self._release, "cuLibraryUnload", library)
        found = self.api("cuLibraryGetKernel", self._libraries[source], name.encode())
        if shared:
            limit = self.api.api.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            self.api("cuKernelSetAttribute", limit, shared, found, self.gpu.handle)
        return self.api.api.CUfunction(int(found))  # taken for a function, it goes with any context

    def launch(
        self, kernel: Any, place: Place, grid: int, block: int, arguments: Sequence[Argument], shared: int = 0
    ) -> None:
        """Queue a kernel on a place's stream. Raises `CudaError`."""
        packed = tuple(value for _, value in arguments), tuple(kind for kind, _ in arguments)
        with self.api.current(place.context):
            self.api("cuLaunchKernel", kernel, grid, 1, 1, block, 1, 1, shared, place.stream, packed, 0)

    def memory(self, size: int) -> int:
        """Address of so many zeroed bytes on the device. Raises `CudaError`."""
        with self.api.current(self._primary):
            address = self.api("cuMemAlloc", size)
            self._undo.callback(self._release, "cuMemFree", address)
        self.write(int(address), np.zeros(size, np.uint8))
        return int(address)

    def write(self, address: int, array: NDArray[Any]) -> None:
        """Copy to the device, and wait for it."""
        with self.api.current(self._primary):
            self.api("cuMemcpyHtoD", address, array.ctypes.data, array.nbytes)
            self.api("cuStreamSynchronize", 0)  # a small copy may return before it is over

    def read(self, address: int, array: NDArray[Any]) -> NDArray[Any]:
        """Copy from the device into `array`, which is returned."""
        with self.api.current(self._primary):
            self.api("cuMemcpyDtoH", array.ctypes.data, address, array.nbytes)
        return array

    def wait(self, *places: Place) -> None:
        """Wait until the places' streams are empty. Raises `CudaError`."""
        for place in places:
            self.api("cuStreamSynchronize", place.stream)

    def close(self) -> None:
        """Give everything back."""
        self._undo.close()

    def __enter__(self) -> Program:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _release(self, call: str, handle: Any) -> None:
        with self.api.current(self._primary):
            self.api(call, handle)
