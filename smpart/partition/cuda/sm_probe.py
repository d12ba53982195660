"""Looks which SMs a place's kernels really run on: the driver's word for it is a count, this is the hardware's.

It speaks to the driver alone, so that neither torch nor cupy is needed to prove a split.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Mapping
from typing import Any

import numpy as np

from smpart.errors import SmpartError
from smpart.kernels import compiled
from smpart.partition.cuda.driver import Driver
from smpart.partition.cuda.gpu import Gpu
from smpart.partition.cuda.places import Place, Places
from smpart.partition.split import Side, Split

_SHARED = 48 * 1024
"""Bytes of a block's shared memory: no SM of any generation holds more than five such blocks at once."""
_BLOCKS_PER_UNIT = 10
_HOLD_NS = 100_000
"""How long each block keeps its place: long against the time in which all blocks of one wave start."""


def read_sms(api: Driver, gpu: Gpu, places: Places) -> Mapping[tuple[Side, Split], frozenset[int]]:
    """The hardware's numbers of every place's SMs. The device must be idle otherwise.

    Each place is given twice as many blocks as all SMs hold at once, so that every SM it may use gets some.

    Raises:
        BackendUnavailable: the kernel cannot be compiled here.
        CudaError: it cannot be run.
        SmpartError: it did not run to its end.
    """
    binary = compiled("smid_probe", f"sm_{gpu.capability[0]}{gpu.capability[1]}").read_bytes()
    blocks = gpu.units * _BLOCKS_PER_UNIT
    with contextlib.ExitStack() as undo:
        undo.enter_context(api.current(places.primary))
        library = api("cuLibraryLoadData", binary, [], [], 0, [], [], 0)
        undo.callback(api, "cuLibraryUnload", library)
        kernel = api("cuLibraryGetKernel", library, b"probe")
        memory = api("cuMemAlloc", 4 * blocks + 16 * blocks)
        undo.callback(api, "cuMemFree", memory)
        return {key: _look(api, place, kernel, int(memory), blocks) for key, place in places.all().items()}


def _look(api: Driver, place: Place, kernel: Any, memory: int, blocks: int) -> frozenset[int]:
    seen = np.full(blocks, -1, np.int32)
    values = (memory + 16 * blocks, memory, _HOLD_NS)  # spans first: they want the alignment
    types = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint64)
    function = api.api.CUfunction(int(kernel))  # the driver takes a kernel for a function, and then any context does
    with api.current(place.context):
        api("cuLaunchKernel", function, blocks, 1, 1, 32, 1, 1, _SHARED, place.stream, (values, types), 0)
        api("cuStreamSynchronize", place.stream)
        api("cuMemcpyDtoH", seen.ctypes.data, memory + 16 * blocks, seen.nbytes)
    if (seen < 0).any():
        raise SmpartError(f"the SM probe left {int((seen < 0).sum())} of {blocks} blocks without an answer")
    return frozenset(seen.tolist())
