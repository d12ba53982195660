"""`Queue` on CUDA through torch: external streams of the lane's own contexts, and captured graphs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from smpart.errors import SmpartError
from smpart.partition.cuda.driver import Driver
from smpart.partition.cuda.places import Place
from smpart.runtime.device.carveout import Carveout
from smpart.runtime.device.graph_check import contexts_of

logger = logging.getLogger(__name__)


class TorchQueue:
    """One lane's. Its graphs share one memory pool: no two of them ever run at the same time.

    torch's allocator keeps freed memory for the stream it was used on. All streams of a lane wait for one another
    (see `StreamLanes`), so what one of them frees may be used again by it alone, after everything before it.

    Args:
        units: SMs of the whole device.
    """

    def __init__(self, api: Driver, device: torch.device, units: int, carveout: Carveout) -> None:
        self._api = api
        self._device = device
        self._units = units
        self._carveout = carveout
        self._streams: dict[int, torch.cuda.ExternalStream] = {}
        self._pool: Any = None

    @contextmanager
    def at(self, place: Place) -> Iterator[None]:
        """See `Queue`."""
        stream = self._streams.get(place.handle)
        if stream is None:
            stream = self._streams[place.handle] = torch.cuda.ExternalStream(  # type: ignore[no-untyped-call]
                place.handle, device=self._device
            )
        self._carveout.leave(self._units - place.units)
        with torch.cuda.stream(stream):
            yield

    def capture(self, place: Place, run: Callable[[], Tensor]) -> TorchReplay:
        """See `Queue`. The graph's kernels are checked to belong to the place's context.

        Raises:
            SmpartError: they do not: replayed, they would run on other SMs.
        """
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        reserved, free = torch.cuda.memory_reserved(self._device), torch.cuda.mem_get_info(self._device)[0]
        # Other threads (the lanes' watchers) go on calling CUDA meanwhile: only this one's calls are looked at.
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            output = run()
        finally:
            graph.capture_end()
        found = contexts_of(self._api, graph.raw_cuda_graph())
        if found - {int(place.context), 0}:  # 0: the driver does not say
            raise SmpartError("its kernels were captured for another context than the lane's")
        graph.instantiate()
        # The driver's own part shows in what is free; what torch had reserved before does not.
        taken = torch.cuda.memory_reserved(self._device) - reserved
        return TorchReplay(graph, output, max(taken, free - torch.cuda.mem_get_info(self._device)[0], 0))


class TorchReplay:
    """See `Replay`."""

    def __init__(self, graph: torch.cuda.CUDAGraph, output: Tensor, memory_bytes: int) -> None:
        self._graph = graph
        self.output = output
        self.memory_bytes = memory_bytes

    def __call__(self) -> None:
        """Queue the graph on torch's current stream."""
        self._graph.replay()
