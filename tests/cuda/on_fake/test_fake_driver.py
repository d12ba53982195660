"""The fake driver itself, through cuda.bindings and cuda.core."""

from typing import Any

import pytest
from cuda.bindings import driver as cu
from cuda.core import ContextOptions, Device, SMResourceOptions
from fake_cuda import Fake

SM = cu.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM


def ok(answer: tuple[Any, ...]) -> Any:
    error, *values = answer
    assert error == cu.CUresult.CUDA_SUCCESS
    return values[0] if len(values) == 1 else tuple(values)


def test_core_splits_and_makes_streams(fake: Fake) -> None:
    device = Device(0)
    device.set_current()
    groups, rest = device.resources.sm.split(SMResourceOptions(count=48))
    assert (groups[0].sm_count, rest.sm_count) == (48, 84)
    context = device.create_context(ContextOptions(resources=[groups[0]]))
    stream = context.create_stream()
    assert stream.resources.sm.sm_count == 48
    stream.sync()
    stream.close()
    context.close()
