"""`Glue` of a real GPU. torch runs on whatever context is current on its thread when it is first used there.

So nothing here calls `torch.cuda.set_device`: that would make the primary context current, where a worker with
execution affinity has one of its own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from smpart.errors import BackendUnavailable
from smpart.partition.cuda.driver import driver
from smpart.runtime.device.carveout import Carveout
from smpart.runtime.device.torch_queue import TorchQueue
from smpart.runtime.mps.client import Glue


def open_glue() -> Glue:
    """See `Glue`.

    Raises:
        BackendUnavailable: torch has no CUDA here, or there is no driver.
    """
    if torch.version.cuda is None:
        raise BackendUnavailable("this torch knows no GPU: install a CUDA build of torch (pip install torch)")
    api, where = driver(), torch.device("cuda", 0)
    return Glue(api, where, lambda units: TorchQueue(api, where, units, Carveout.of_torch()), _view)


class _Bytes:
    """Device memory as torch takes it (CUDA array interface, version 3)."""

    def __init__(self, pointer: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (pointer, False),
            "strides": None,
            "version": 3,
        }


def _view(pointer: int, size: int) -> Tensor:
    return torch.as_tensor(_Bytes(pointer, size), device="cuda:0")
