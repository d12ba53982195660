"""The fake driver's green contexts, and contexts with an execution affinity."""

import threading
from typing import Any

import pytest
from cuda.bindings import driver as cu
from cuda.core import ContextOptions, Device, SMResourceOptions
from cuda_calls import SM, Lanes, code, current, green, ok, split
from fake_cuda import Fake


def test_core_splits_and_makes_streams(fake: Fake) -> None:
    device = Device(0)
    device.set_current()
    made, rest = device.resources.sm.split(SMResourceOptions(count=48))
    assert (made[0].sm_count, rest.sm_count) == (48, 84)
    context = device.create_context(ContextOptions(resources=[made[0]]))
    stream = context.create_stream()
    assert stream.resources.sm.sm_count == 48
    before = device.set_current(context)
    event = stream.record()
    event.sync()
    event.close()
    stream.close()
    device.set_current(before)
    context.close()


def test_flags_that_are_required(primary: Any) -> None:
    (group, *_), _ = split(48)
    assert code(cu.cuGreenCtxCreate(ok(cu.cuDevResourceGenerateDesc([group], 1)), 0, 0)) == "INVALID_VALUE"
    made = green(group)
    assert code(cu.cuGreenCtxStreamCreate(made, 0, 0)) == "INVALID_VALUE"
    ok(cu.cuGreenCtxDestroy(made))


@pytest.mark.drivers("12.4")
def test_without_streams_of_its_own_a_green_context_is_made_current(primary: Any) -> None:
    (group, *_), _ = split(48)
    made = green(group)
    with current(ok(cu.cuCtxFromGreenCtx(made))):
        stream = ok(cu.cuStreamCreate(1))
    assert int(ok(cu.cuStreamGetGreenCtx(stream))) == int(made)
    ok(cu.cuStreamDestroy(stream))
    ok(cu.cuGreenCtxDestroy(made))


def test_a_green_context_is_no_context(primary: Any, lanes: Lanes, fake: Fake) -> None:
    assert code(cu.cuCtxSetCurrent(cu.CUcontext(int(lanes.greens[0])))) == "INVALID_CONTEXT"
    assert "cuCtxFromGreenCtx" in fake.take_misuse()[0]
    assert code(cu.cuCtxDestroy(lanes.contexts[0])) == "INVALID_CONTEXT"
    assert "not its to destroy" in fake.take_misuse()[0]


def test_what_streams_and_contexts_say_of_themselves(primary: Any, lanes: Lanes) -> None:
    for made, context, stream, sms in zip(lanes.greens, lanes.contexts, lanes.streams, (48, 84), strict=True):
        assert int(ok(cu.cuStreamGetCtx(stream))) == int(context)
        of, its_green = ok(cu.cuStreamGetCtx_v2(stream))
        assert (int(of), int(its_green)) == (int(primary), int(made))
        assert ok(cu.cuCtxGetDevResource(context, SM)).sm.smCount == sms
    assert ok(cu.cuCtxGetDevResource(primary, SM)).sm.smCount == 132


def test_handles_end_once(primary: Any, fake: Fake) -> None:
    made = Lanes()
    made.close()
    assert code(cu.cuGreenCtxDestroy(made.greens[0])) == "CONTEXT_IS_DESTROYED"
    assert code(cu.cuStreamDestroy(made.streams[0])) == "INVALID_HANDLE"
    assert code(cu.cuEventDestroy(made.events[0])) == "INVALID_HANDLE"
    assert code(cu.cuStreamSynchronize(cu.CUstream(0x1234560))) == "INVALID_HANDLE"
    ends = [f"{kind} 1 used after its end" for kind in ("green context", "stream", "event")]
    names = ["cuGreenCtxDestroy", "cuStreamDestroy", "cuEventDestroy"]
    *records, unknown = fake.take_misuse()
    assert records == [f"{name}: {end}" for name, end in zip(names, ends, strict=True)]
    assert unknown == "cuStreamSynchronize: 0x1234560 was never a stream"


def test_a_handle_of_an_earlier_test_is_known_as_such(fake: Fake) -> None:
    ok(cu.cuCtxSetCurrent(ok(cu.cuDevicePrimaryCtxRetain(0))))
    event = ok(cu.cuEventCreate(0))
    fake.reset()
    assert code(cu.cuEventQuery(event)) == "INVALID_HANDLE"
    assert fake.take_misuse() == ["cuEventQuery: this event handle is of before the last reset"]
    ok(cu.cuDevicePrimaryCtxRelease(0))


@pytest.mark.drivers("13.0", "13.1")
def test_a_green_context_that_ends_before_its_stream(primary: Any, fake: Fake) -> None:
    made = Lanes()
    ok(cu.cuGreenCtxDestroy(made.greens[0]))
    misuse = fake.take_misuse()
    assert [record.partition(": ")[2] for record in misuse] == ["stream 1 of it is alive", "event 1 of it is alive"]
    late = "STREAM_DETACHED" if fake.driver == "13.1" else "CONTEXT_IS_DESTROYED"
    assert code(cu.cuStreamQuery(made.streams[0])) == late
    # "With the exception of cuStreamDestroy", says the header of 13.1; "including cuStreamDestroy" that of 13.0.
    assert code(cu.cuStreamDestroy(made.streams[0])) == ("SUCCESS" if fake.driver == "13.1" else late)
    fake.take_misuse()
    fake.excuse_live()


def test_a_context_that_ends_while_current(primary: Any, fake: Fake) -> None:
    (group, *_), _ = split(48)
    made = green(group)
    with current(ok(cu.cuCtxFromGreenCtx(made))):
        ok(cu.cuGreenCtxDestroy(made))
        assert code(cu.cuCtxSynchronize()) == "CONTEXT_IS_DESTROYED"
    assert "it is current to this thread" in fake.take_misuse()[0]


def test_a_green_handle_is_for_one_thread_at_a_time(lanes: Lanes, fake: Fake) -> None:
    def other() -> None:
        ok(cu.cuCtxFromGreenCtx(lanes.greens[0]))

    with fake.held("cuCtxFromGreenCtx"):
        thread = threading.Thread(target=other)
        thread.start()
        fake.wait_held()
        ok(cu.cuGreenCtxGetDevResource(lanes.greens[1], SM))
        assert fake.misuse() == []
        ok(cu.cuGreenCtxGetDevResource(lanes.greens[0], SM))
    thread.join()
    assert fake.take_misuse() == ["cuGreenCtxGetDevResource: green context 1 is in use by another thread"]


def test_the_primary_context_is_counted(fake: Fake) -> None:
    ok(cu.cuDevicePrimaryCtxRetain(0))
    assert fake.live() == {"primary context": 1}
    ok(cu.cuDevicePrimaryCtxRelease(0))
    assert fake.live() == {}


# ---- Contexts with an execution affinity ------------------------------------------------------------------------


def test_an_execution_affinity_needs_mps(primary: Any, fake: Fake) -> None:
    affinity = cu.CUexecAffinityParam()
    affinity.type = cu.CUexecAffinityType.CU_EXEC_AFFINITY_TYPE_SM_COUNT
    affinity.param.smCount.val = 33
    params = cu.CUctxCreateParams()
    params.execAffinityParams, params.numExecAffinityParams = [affinity], 1
    assert ok(cu.cuDeviceGetExecAffinitySupport(affinity.type, 0)) == 0
    assert code(cu.cuCtxCreate(params, 0, 0)) == "UNSUPPORTED_EXEC_AFFINITY"
    assert "needs MPS" in fake.take_misuse()[0]
    ok(cu.cuCtxSetCurrent(cu.CUcontext(0)))
    ok(cu.cuDevicePrimaryCtxRelease(0))
    fake.reset(mps=1)
    assert ok(cu.cuDeviceGetExecAffinitySupport(affinity.type, 0)) == 1
    context = ok(cu.cuCtxCreate(params, 0, 0))
    assert ok(cu.cuCtxGetExecAffinity(affinity.type)).param.smCount.val == 34  # rounded up: read it back
    assert ok(cu.cuCtxGetDevResource(context, SM)).sm.smCount == 34
    ok(cu.cuCtxDestroy(context))
    ok(cu.cuDevicePrimaryCtxRetain(0))
