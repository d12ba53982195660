"""What a worker does for itself as an MPS client: make a context with its share, and read back what it has."""

from __future__ import annotations

from typing import Any

from smpart.errors import BackendUnavailable
from smpart.partition.cuda.driver import CudaError, Driver
from smpart.partition.cuda.mps_shares import Seen

_INVALID_VALUE = 1
_UNSUPPORTED_AFFINITY = 224


def affinity_context(api: Driver, device: Any, sms: int) -> Any:
    """A context (`CUcontext`), current on this thread, that uses at most so many SMs, rounded up by the driver.

    The caller destroys it with `cuCtxDestroy`.

    Raises:
        BackendUnavailable: this process is no MPS client; only they may have contexts with execution affinity.
        CudaError: the driver refused for another reason.
    """
    kind = api.api.CUexecAffinityType.CU_EXEC_AFFINITY_TYPE_SM_COUNT
    if not api("cuDeviceGetExecAffinitySupport", kind, device):
        raise BackendUnavailable(
            "contexts with execution affinity need an MPS client: start this process under an MPS daemon, or use mps"
        )
    affinity = api.api.CUexecAffinityParam()
    affinity.type = kind
    affinity.param.smCount.val = sms
    creation = api.api.CUctxCreateParams()
    creation.execAffinityParams = [affinity]
    creation.numExecAffinityParams = 1
    return api("cuCtxCreate", creation, 0, device)


def look(api: Driver, device: Any) -> Seen:
    """What this process has of the device. Call it with the worker's context current. Raises `CudaError`."""
    attributes = api.api.CUdevice_attribute
    return Seen(
        mps=_mps_enabled(api, device),
        sms=api("cuDeviceGetAttribute", attributes.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, device),
        affinity=_affinity(api),
    )


def _mps_enabled(api: Driver, device: Any) -> bool | None:
    attribute = getattr(api.api.CUdevice_attribute, "CU_DEVICE_ATTRIBUTE_MPS_ENABLED", None)
    if attribute is None:
        return None
    try:
        return bool(api("cuDeviceGetAttribute", attribute, device))
    except CudaError as error:
        if error.code != _INVALID_VALUE:  # what a driver says that does not know the attribute
            raise
        return None


def _affinity(api: Driver) -> int | None:
    try:
        found = api("cuCtxGetExecAffinity", api.api.CUexecAffinityType.CU_EXEC_AFFINITY_TYPE_SM_COUNT)
    except CudaError as error:
        if error.code != _UNSUPPORTED_AFFINITY:
            raise
        return None
    return int(found.param.smCount.val)
