"""Device memory that the holder owns and the workers map: weights, KV pages, tokens."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

from smpart.errors import BackendUnavailable
from smpart.partition.cuda.driver import CudaError, Driver
from smpart.partition.cuda.ipc import Exported, export

_UNSUPPORTED = frozenset({1, 201, 801})
"""What `export` may meet where the device has no CUDA IPC for memory of `cuMemAlloc`."""


@dataclass(frozen=True, slots=True)
class Holding:
    """One allocation of this process.

    Attributes:
        pointer: its address here.
        exported: what others open it by.
    """

    pointer: int
    exported: Exported


def allocate(api: Driver, size: int, undo: contextlib.ExitStack, ordinal: int = 0) -> Holding:
    """Allocate `size` bytes that other processes can map, zeroed. `undo` gives them back.

    Memory of `cuMemAlloc` by CUDA IPC; where the device has none, memory of `cuMemCreate` by file descriptor.

    Raises:
        CudaError: there is not so much memory, or another failure.
        BackendUnavailable: the device shares memory in neither way.
    """
    with contextlib.ExitStack() as mine:
        pointer = int(api("cuMemAlloc", size))
        mine.callback(api, "cuMemFree", pointer)
        try:
            exported = export(api, pointer)
        except (BackendUnavailable, CudaError) as error:
            if isinstance(error, CudaError) and error.code not in _UNSUPPORTED:
                raise
            mine.close()
            pointer = _create(api, size, mine, ordinal)
            exported = export(api, pointer)
            mine.callback(exported.close)
        api("cuMemsetD8Async", pointer, 0, size, 0)
        api("cuCtxSynchronize")
        undo.push(mine.pop_all())
    return Holding(pointer, exported)


def _create(api: Driver, size: int, undo: contextlib.ExitStack, ordinal: int) -> int:
    """Virtual memory, mapped here, that may be exported as a file descriptor."""
    cuda = api.api
    properties = cuda.CUmemAllocationProp()
    properties.type = cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    properties.location.id = ordinal
    properties.requestedHandleTypes = cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    least = cuda.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
    unit = int(api("cuMemGetAllocationGranularity", properties, least))
    size = -(-size // unit) * unit
    allocation = api("cuMemCreate", size, properties, 0)
    undo.callback(api, "cuMemRelease", allocation)
    base = int(api("cuMemAddressReserve", size, 0, 0, 0))
    undo.callback(api, "cuMemAddressFree", base, size)
    api("cuMemMap", base, size, 0, allocation, 0)
    undo.callback(api, "cuMemUnmap", base, size)
    api("cuMemSetAccess", base, size, [_read_write(api, properties.location)], 1)
    return base


def _read_write(api: Driver, location: Any) -> Any:
    access = api.api.CUmemAccessDesc()
    access.location.type, access.location.id = location.type, location.id
    access.flags = api.api.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    return access
