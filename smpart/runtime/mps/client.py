"""A process's way onto the device: its environment first, then the driver, and torch over memory of others."""

from __future__ import annotations

import contextlib
import os
import pkgutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from smpart.errors import SmpartError
from smpart.partition.cuda.driver import CudaError, Driver
from smpart.partition.cuda.mps_client import affinity_context
from smpart.partition.cuda.mps_control import CLIENT_VARIABLES
from smpart.runtime.device.queue import Queue

_NOT_READY = 807
"""CUDA_ERROR_MPS_SERVER_NOT_READY: after one client's fatal fault, until all that were there have ended."""
_PATIENCE_S = 10.0
_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class Glue:
    """What of torch and the driver is not the same everywhere.

    Attributes:
        where: torch's name of the device.
        queue: makes a lane's queue, for a process to which the device seems to have so many SMs.
        view: uint8 tensor over bytes at a device address; copies nothing.
        close: called last.
    """

    api: Driver
    where: torch.device
    queue: Callable[[int], Queue]
    view: Callable[[int, int], Tensor]
    close: Callable[[], None] = lambda: None


def enter(environment: Mapping[str, str], glue: str) -> Glue:
    """Become the client that an environment says, before anything of CUDA is used in this process.

    Args:
        environment: variables to set. Those of MPS clients that are not in it are removed.
        glue: ``module:function`` that gives the `Glue`.

    Raises:
        BackendUnavailable, CudaError: the device cannot be used.
    """
    for name in CLIENT_VARIABLES:
        os.environ.pop(name, None)
    os.environ.update(environment)
    opened: Glue = patiently(pkgutil.resolve_name(glue))
    return opened


def patiently(open: Callable[[], Any]) -> Any:
    """What `open` gives; while the MPS server takes no clients, it is tried again for some seconds."""
    until = time.monotonic() + _PATIENCE_S
    while True:
        try:
            return open()
        except SmpartError as error:
            cause = error if isinstance(error, CudaError) else error.__context__
            if not isinstance(cause, CudaError) or cause.code != _NOT_READY or time.monotonic() > until:
                raise
        time.sleep(_POLL_S)


@contextlib.contextmanager
def context(api: Driver, device: Any, affinity: int | None = None) -> Iterator[Any]:
    """A context (`CUcontext`), current on this thread: the primary one, or one with execution affinity.

    Raises:
        BackendUnavailable, CudaError: see `affinity_context`.
    """
    if affinity is not None:
        made = patiently(lambda: affinity_context(api, device, affinity))
        try:
            yield made
        finally:
            api("cuCtxDestroy", made)
        return
    made = patiently(lambda: api("cuDevicePrimaryCtxRetain", device))
    try:
        with api.current(made):
            yield made
    finally:
        api("cuDevicePrimaryCtxRelease", device)
