"""Device memory of one process, mapped into others: a holder owns weights and KV, workers compute on them.

Memory from `cuMemAlloc` goes by CUDA IPC: bytes that may be sent anywhere. Memory from `cuMemCreate` (torch's
``expandable_segments``) cannot; its allocation goes as a file descriptor, which the sender passes on over a Unix
socket (``socket.send_fds``). Importers lose the memory when the exporter ends: it must outlive them.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from dataclasses import dataclass
from typing import Any

from smpart.errors import BackendUnavailable
from smpart.partition.cuda.driver import CudaError, Driver

_NOT_IPC = frozenset({1, 801})
"""What `cuIpcGetMemHandle` says of memory that was not made by `cuMemAlloc`: invalid value, not supported."""

_TOKEN_BYTES = 64
"""Size of a `CUipcMemHandle` (``CU_IPC_HANDLE_SIZE``), which the bindings keep opaque."""


@dataclass(frozen=True, slots=True)
class Exported:
    """One allocation, ready to be opened elsewhere.

    Attributes:
        size: bytes of the whole allocation.
        offset: of the exported pointer in it, in bytes.
        token: CUDA IPC handle, 64 bytes; None if it goes by file descriptor.
        fd: file descriptor, owned by this object; None if it goes by token.
    """

    size: int
    offset: int
    token: bytes | None = None
    fd: int | None = None

    def close(self) -> None:
        """Give the file descriptor back, once it is sent or opened. Call it once."""
        if self.fd is not None:
            os.close(self.fd)


class Mapped:
    """Another process's allocation, mapped here.

    Attributes:
        pointer: where the exported pointer is in this process.
    """

    def __init__(self, pointer: int, undo: contextlib.ExitStack) -> None:
        self.pointer = pointer
        self._undo = undo

    def close(self) -> None:
        """Unmap it. Everything that was launched on it must have ended. Idempotent. Raises `CudaError`."""
        self._undo.close()


def export(api: Driver, pointer: int) -> Exported:
    """Make the allocation around a device pointer known to other processes of this user.

    Raises:
        BackendUnavailable: memory that was made neither by `cuMemAlloc` nor to be shared.
        CudaError: another failure.
    """
    base, size = api("cuMemGetAddressRange", pointer)
    offset = pointer - int(base)
    try:
        handle = api("cuIpcGetMemHandle", base)
        return Exported(size, offset, token=ctypes.string_at(handle.getPtr(), _TOKEN_BYTES))
    except CudaError as error:
        if error.code not in _NOT_IPC:
            raise
    allocation = api("cuMemRetainAllocationHandle", base)
    try:
        return Exported(size, offset, fd=int(api("cuMemExportToShareableHandle", allocation, _posix_fd(api), 0)))
    except CudaError as error:
        if error.code not in _NOT_IPC:
            raise
        raise BackendUnavailable(
            "this device memory was not made to be shared: allocate it with cuMemAlloc (torch: "
            "PYTORCH_CUDA_ALLOC_CONF without expandable_segments)"
        ) from None
    finally:
        api("cuMemRelease", allocation)


def open_exported(api: Driver, exported: Exported, ordinal: int = 0) -> Mapped:
    """Map an allocation of another process, for reading and writing. A process cannot open its own by token.

    Args:
        ordinal: number of the device in this process.

    Raises:
        CudaError: a call failed; nothing is left mapped.
    """
    with contextlib.ExitStack() as undo:
        if exported.token is not None:
            base = _open_token(api, exported.token, undo)
        else:
            base = _open_fd(api, exported, ordinal, undo)
        return Mapped(base + exported.offset, undo.pop_all())


def _open_token(api: Driver, token: bytes, undo: contextlib.ExitStack) -> int:
    handle = api.api.CUipcMemHandle()
    ctypes.memmove(handle.getPtr(), token, _TOKEN_BYTES)
    lazily = int(api.api.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS)
    base = api("cuIpcOpenMemHandle", handle, lazily)
    undo.callback(api, "cuIpcCloseMemHandle", base)
    return int(base)


def _open_fd(api: Driver, exported: Exported, ordinal: int, undo: contextlib.ExitStack) -> int:
    size = exported.size
    allocation = api("cuMemImportFromShareableHandle", exported.fd, _posix_fd(api))
    try:
        base = api("cuMemAddressReserve", size, 0, 0, 0)
        undo.callback(api, "cuMemAddressFree", base, size)
        api("cuMemMap", base, size, 0, allocation, 0)
        undo.callback(api, "cuMemUnmap", base, size)
    finally:
        api("cuMemRelease", allocation)  # the mapping keeps it
    api("cuMemSetAccess", base, size, [_read_write(api, ordinal)], 1)
    return int(base)


def _read_write(api: Driver, ordinal: int) -> Any:
    access = api.api.CUmemAccessDesc()
    access.location.type = api.api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    access.location.id = ordinal
    access.flags = api.api.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    return access


def _posix_fd(api: Driver) -> Any:
    return api.api.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
