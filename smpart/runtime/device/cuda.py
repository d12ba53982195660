"""Opens the first visible GPU for a device's process: green contexts, their SMs looked at, torch on their streams."""

from __future__ import annotations

import logging

import torch

from smpart.errors import BackendUnavailable
from smpart.partition.cuda.driver import Driver, driver
from smpart.partition.cuda.sm_probe import read_sms
from smpart.partition.green import Green, GreenPlaces
from smpart.partition.split import Side
from smpart.runtime.device.carveout import Carveout
from smpart.runtime.device.machine import DeviceArgs, Parts
from smpart.runtime.device.torch_queue import TorchQueue

logger = logging.getLogger(__name__)


def open_parts(args: DeviceArgs) -> Parts:
    """See `Parts`.

    Raises:
        BackendUnavailable: torch has no CUDA here, or no lanes can be made.
        CudaError: the driver refuses something.
    """
    if not torch.cuda.is_available():
        raise BackendUnavailable("this torch sees no GPU: install a CUDA build of torch (pip install torch)")
    torch.cuda.set_device(0)
    api = driver()
    places = Green().open()
    try:
        gpu, where, carveout = places.gpu, torch.device("cuda", 0), Carveout.of_torch()
        proof = _prove(api, places)

        def queue(side: Side) -> TorchQueue:
            return TorchQueue(api, where, gpu.units, carveout)

        notes = {"lanes": str(places), "sms": proof}
        return Parts(api, gpu.device(api), places, where, queue, _free, places.close, notes)
    except BaseException:
        places.close()
        raise


def _prove(api: Driver, places: GreenPlaces) -> str:
    """Look at every place's SMs with a kernel, so that one lane may move on while the other finishes."""
    try:
        sms = read_sms(api, places.gpu, places)
    except BackendUnavailable as error:
        logger.warning("the lanes' SMs were not looked at (%s): prefill pauses at every move of the line", error)
        return f"not looked at: {error}"
    places.learn(sms)
    return "looked at by a kernel, on every side of every split"


def _free() -> int:
    return int(torch.cuda.mem_get_info()[0])
