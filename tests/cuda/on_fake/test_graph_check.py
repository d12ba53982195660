"""Whose context the kernels of a captured graph belong to."""

from __future__ import annotations

import pytest
from cuda.bindings import driver as cu
from cuda_calls import PTX, current, kernel, launch, ok
from fake_cuda import Fake

from smpart.partition import Side, Split
from smpart.partition.cuda.driver import CudaError, driver
from smpart.partition.green import Green
from smpart.runtime.device.graph_check import contexts_of


def test_the_contexts_are_those_of_the_capture_streams(fake: Fake) -> None:
    with Green().open(step=56) as places:
        mine, other = (places.all()[side, Split(56, 76)] for side in Side)
        with current(mine.context):
            module = ok(cu.cuModuleLoadData(PTX))
            work = kernel(module)
            ok(cu.cuStreamBeginCapture(mine.stream, cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL))
            launch(work, mine.stream)
            launch(work, mine.stream)
            graph = ok(cu.cuStreamEndCapture(mine.stream))
        assert contexts_of(driver(), int(graph)) == {int(mine.context)}
        assert int(mine.context) != int(other.context)
        ok(cu.cuGraphDestroy(graph))
        with current(mine.context):
            ok(cu.cuModuleUnload(module))


def test_no_graph_is_an_error(fake: Fake) -> None:
    with pytest.raises(CudaError):
        contexts_of(driver(), 12345)
    fake.take_misuse()
