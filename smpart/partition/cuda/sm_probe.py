"""Looks which SMs a place's kernels really run on: the driver's word for it is a count, this is the hardware's."""

from __future__ import annotations

import importlib
from collections.abc import Mapping

from smpart.errors import BackendUnavailable
from smpart.kernels import Kernels, launch
from smpart.partition.cuda.driver import Driver
from smpart.partition.cuda.gpu import Gpu
from smpart.partition.cuda.places import Place, Places
from smpart.partition.split import Side, Split

_BLOCKS_PER_UNIT = 4
_HOLD_NS = 200_000
"""How long each block keeps its SM: long against the time in which all blocks of one wave start."""


def read_sms(api: Driver, gpu: Gpu, places: Places) -> Mapping[tuple[Side, Split], frozenset[int]]:
    """The hardware's numbers of every place's SMs. The device must be idle otherwise.

    Raises:
        BackendUnavailable: cupy or NVRTC is missing.
        CudaError: a kernel failed.
    """
    try:
        cupy = importlib.import_module("cupy")
        import numpy as np
    except ImportError:
        raise BackendUnavailable("cupy is missing: pip install 'smpart[cuda]'") from None
    probe = Kernels(f"sm_{gpu.capability[0]}{gpu.capability[1]}").function("smid_probe", "probe")
    attributes = api.api.CUdevice_attribute
    shared = api("cuDeviceGetAttribute", attributes.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, gpu.handle)
    blocks = gpu.units * _BLOCKS_PER_UNIT
    seen, spans = cupy.empty(blocks, cupy.int32), cupy.empty((blocks, 2), cupy.uint64)

    def look(place: Place) -> frozenset[int]:
        seen.fill(-1)
        cupy.cuda.get_current_stream().synchronize()
        launch(probe, blocks, 32, (seen, spans, np.uint64(_HOLD_NS)), place.handle, shared)
        api("cuStreamSynchronize", place.stream)
        return frozenset(cupy.asnumpy(seen).tolist())

    with api.current(places.primary):
        return {key: look(place) for key, place in places.all().items()}
