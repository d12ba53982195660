"""The fake driver's streams: asynchronous, in order, and strict about what was drained."""

import threading
from typing import Any

import pytest
from cuda.bindings import driver as cu
from cuda_calls import PTX, Lanes, call_on, code, current, green, kernel, launch, ok, split
from fake_cuda import Fake


def test_work_runs_in_order_and_across_streams_by_events(lanes: Lanes) -> None:
    seen: list[int] = []
    a, b = lanes.streams
    kept = [call_on(a, lambda: seen.append(1)), call_on(a, lambda: seen.append(2))]
    ok(cu.cuEventRecord(lanes.events[0], a))
    ok(cu.cuStreamWaitEvent(b, lanes.events[0], 0))
    kept.append(call_on(b, lambda: seen.append(3)))
    ok(cu.cuStreamSynchronize(b))
    assert seen == [1, 2, 3]


def test_a_stream_does_not_wait_for_another(lanes: Lanes, fake: Fake) -> None:
    with fake.paused(lanes.streams[0]):
        kept = [call_on(stream, lambda: None) for stream in lanes.streams]
        ok(cu.cuStreamSynchronize(lanes.streams[1]))
        assert code(cu.cuStreamQuery(lanes.streams[0])) == "NOT_READY"
    ok(cu.cuStreamSynchronize(lanes.streams[0]))
    assert code(cu.cuStreamQuery(lanes.streams[0])) == "SUCCESS"
    assert len(kept) == 2


def test_events(lanes: Lanes, fake: Fake) -> None:
    start, stream = lanes.events[0], lanes.streams[0]
    with current(lanes.contexts[0]):
        end, untimed = ok(cu.cuEventCreate(0)), ok(cu.cuEventCreate(2))
    assert code(cu.cuEventQuery(start)) == "SUCCESS"  # never recorded: nothing to wait for
    assert code(cu.cuEventElapsedTime(start, end)) == "INVALID_HANDLE"
    with fake.paused():
        for event in (start, end, untimed):
            ok(cu.cuEventRecord(event, stream))
        assert code(cu.cuEventQuery(end)) == "NOT_READY"
        assert code(cu.cuEventElapsedTime(start, end)) == "NOT_READY"
    ok(cu.cuEventSynchronize(untimed))
    assert ok(cu.cuEventElapsedTime(start, end)) >= 0
    assert code(cu.cuEventElapsedTime(start, untimed)) == "INVALID_HANDLE"
    ok(cu.cuEventDestroy(end))
    ok(cu.cuEventDestroy(untimed))


def test_waiting_is_for_the_recording_that_was_there(lanes: Lanes, fake: Fake) -> None:
    a, b = lanes.streams
    ok(cu.cuEventRecord(lanes.events[0], a))
    ok(cu.cuStreamWaitEvent(b, lanes.events[0], 0))
    ok(cu.cuStreamSynchronize(a))
    with fake.paused(a):
        ok(cu.cuEventRecord(lanes.events[0], a))
        ok(cu.cuStreamSynchronize(b))
    lanes.drain()


def test_an_event_is_for_streams_of_its_context(primary: Any, lanes: Lanes, fake: Fake) -> None:
    of_primary = ok(cu.cuEventCreate(0))
    assert code(cu.cuEventRecord(lanes.events[0], lanes.streams[1])) == "INVALID_HANDLE"
    assert code(cu.cuEventRecord(of_primary, lanes.streams[0])) == "INVALID_HANDLE"
    assert len(fake.take_misuse()) == 2
    ok(cu.cuStreamWaitEvent(lanes.streams[1], lanes.events[0], 0))  # waiting may cross contexts
    ok(cu.cuEventDestroy(of_primary))
    lanes.drain()


def test_events_of_the_primary_context_if_told_so(fake: Fake) -> None:
    fake.reset(events_per_primary=1)
    ok(cu.cuCtxSetCurrent(ok(cu.cuDevicePrimaryCtxRetain(0))))
    lanes, event = Lanes(), ok(cu.cuEventCreate(0))
    ok(cu.cuEventRecord(event, lanes.streams[0]))
    ok(cu.cuEventSynchronize(event))
    ok(cu.cuEventDestroy(event))
    lanes.close()
    ok(cu.cuCtxSetCurrent(cu.CUcontext(0)))
    ok(cu.cuDevicePrimaryCtxRelease(0))


def test_an_undrained_stream_is_not_destroyed(primary: Any, fake: Fake) -> None:
    stream = ok(cu.cuStreamCreate(1))
    done = threading.Event()
    kept = call_on(stream, done.set)
    assert done.wait(10)  # it has run, but the driver told nobody: that it was fast is luck
    ok(cu.cuStreamDestroy(stream))
    assert fake.take_misuse() == ["cuStreamDestroy: stream 1 not drained"]
    assert kept


@pytest.mark.parametrize("how", ["synchronize", "query", "event", "through the other stream", "context"])
def test_what_counts_as_drained(primary: Any, lanes: Lanes, how: str) -> None:
    a, b = lanes.streams
    ok(cu.cuEventRecord(lanes.events[0], a))
    if how == "synchronize":
        ok(cu.cuStreamSynchronize(a))
    elif how == "query":
        while code(cu.cuStreamQuery(a)) == "NOT_READY":
            pass
    elif how == "event":
        ok(cu.cuEventSynchronize(lanes.events[0]))
    elif how == "context":
        ok(cu.cuCtxSynchronize())
    else:
        ok(cu.cuStreamWaitEvent(b, lanes.events[0], 0))
        ok(cu.cuEventRecord(lanes.events[1], b))
        ok(cu.cuEventSynchronize(lanes.events[1]))


def test_a_destroyed_stream_still_finishes(primary: Any, fake: Fake) -> None:
    stream, done = ok(cu.cuStreamCreate(1)), threading.Event()
    with fake.paused():
        kept = call_on(stream, done.set)
        ok(cu.cuStreamDestroy(stream))
    assert done.wait(10) and kept
    fake.take_misuse()


def test_a_context_does_not_end_under_pending_events(fake: Fake) -> None:
    context = ok(cu.cuCtxCreate(None, 0, 0))
    stream, event = ok(cu.cuStreamCreate(1)), ok(cu.cuEventCreate(0))
    with fake.paused():
        ok(cu.cuEventRecord(event, stream))
        ok(cu.cuCtxDestroy(context))
        ends = ["stream 1 of it is alive and not drained", "event 1 of it is alive and pending"]
        assert fake.take_misuse() == [f"cuCtxDestroy: {end}" for end in ends]
    fake.excuse_live()


def test_calls_that_need_a_context(fake: Fake) -> None:
    for answer in (cu.cuStreamCreate(1), cu.cuEventCreate(0), cu.cuMemAlloc(64), cu.cuCtxSynchronize()):
        assert code(answer) == "INVALID_CONTEXT"
    assert {record.partition(": ")[2] for record in fake.take_misuse()} == {"no context is current to this thread"}


def test_contexts_are_stacked_a_thread(primary: Any, lanes: Lanes) -> None:
    found: list[int] = []
    with current(lanes.contexts[0]):
        thread = threading.Thread(target=lambda: found.append(int(ok(cu.cuCtxGetCurrent()))))
        thread.start()
        thread.join()
        assert int(ok(cu.cuCtxGetCurrent())) == int(lanes.contexts[0])
    assert int(ok(cu.cuCtxGetCurrent())) == int(primary)
    assert found == [0]


def test_events_of_a_whole_green_context(lanes: Lanes, fake: Fake) -> None:
    second = ok(cu.cuGreenCtxStreamCreate(lanes.greens[0], 1, 0))
    with fake.paused(second):
        kept = call_on(second, lambda: None)
        ok(cu.cuGreenCtxRecordEvent(lanes.greens[0], lanes.events[0]))
        assert code(cu.cuEventQuery(lanes.events[0])) == "NOT_READY"
        ok(cu.cuGreenCtxWaitEvent(lanes.greens[1], lanes.events[0]))
        assert code(cu.cuStreamQuery(lanes.streams[1])) == "NOT_READY"
    ok(cu.cuStreamSynchronize(lanes.streams[1]))
    ok(cu.cuEventSynchronize(lanes.events[0]))
    ok(cu.cuStreamDestroy(second))
    assert kept


# ---- Kernels ----------------------------------------------------------------------------------------------------


def test_kernels_run_on_the_sms_of_their_lane(primary: Any, lanes: Lanes, fake: Fake) -> None:
    module = ok(cu.cuModuleLoadData(PTX))
    work = kernel(module)
    assert code(cu.cuModuleGetFunction(module, b"wor")) == "NOT_FOUND"
    plain = ok(cu.cuStreamCreate(1))
    for stream in (*lanes.streams, plain):
        ok(launch(work, stream))
        ok(cu.cuStreamSynchronize(stream))
    left, right, whole = fake.launches()
    assert [left.context, right.context, whole.context] == [int(each) for each in (*lanes.contexts, primary)]
    assert (len(left.sms), len(right.sms)) == (48, 84)
    assert not left.sms & right.sms and left.sms | right.sms == whole.sms == frozenset(range(132))
    ok(cu.cuStreamDestroy(plain))
    ok(cu.cuModuleUnload(module))
    assert code(launch(work, lanes.streams[0])) == "INVALID_HANDLE"
    assert "was unloaded" in fake.take_misuse()[0]


def test_groups_of_one_split_share_no_sm(primary: Any, fake: Fake) -> None:
    module = ok(cu.cuModuleLoadData(PTX))
    made, rest = split(16, groups=4)
    greens = [green(part) for part in (*made, rest)]
    streams = [ok(cu.cuGreenCtxStreamCreate(each, 1, 0)) for each in greens]
    for stream in streams:
        ok(launch(kernel(module), stream))
        ok(cu.cuStreamSynchronize(stream))
        ok(cu.cuStreamDestroy(stream))
    assert sum(len(each.sms) for each in fake.launches()) == 132
    assert len(frozenset.union(*(each.sms for each in fake.launches()))) == 132
    for each in greens:
        ok(cu.cuGreenCtxDestroy(each))
    ok(cu.cuModuleUnload(module))


def test_a_module_in_use_is_not_unloaded(lanes: Lanes, fake: Fake) -> None:
    module = ok(cu.cuModuleLoadData(PTX))
    ok(launch(kernel(module), lanes.streams[0]))
    ok(cu.cuModuleUnload(module))
    assert fake.take_misuse() == ["cuModuleUnload: module 1 has kernels in stream 1, which was not drained"]
    lanes.drain()


def test_what_a_launch_refuses(lanes: Lanes, fake: Fake) -> None:
    module = ok(cu.cuModuleLoadData(PTX))
    work = kernel(module)
    assert code(launch(work, lanes.streams[0], grid=0)) == "INVALID_VALUE"
    assert code(cu.cuLaunchKernel(work, 1, 1, 1, 1025, 1, 1, 0, lanes.streams[0], 0, 0)) == "INVALID_VALUE"
    too_much = 48 * 1024 + 1
    assert code(cu.cuLaunchKernel(work, 1, 1, 1, 1, 1, 1, too_much, lanes.streams[0], 0, 0)) == "INVALID_VALUE"
    dynamic = cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    ok(cu.cuFuncSetAttribute(work, dynamic, 200 * 1024))
    ok(cu.cuLaunchKernel(work, 1, 1, 1, 1, 1, 1, too_much, lanes.streams[0], 0, 0))
    lanes.drain()
    ok(cu.cuModuleUnload(module))
    assert fake.misuse() == []


def test_a_kernel_of_another_context_is_refused(primary: Any, lanes: Lanes, fake: Fake) -> None:
    context = ok(cu.cuCtxCreate(None, 0, 0))
    module = ok(cu.cuModuleLoadData(PTX))
    assert code(launch(kernel(module), lanes.streams[0])) == "INVALID_HANDLE"
    assert "do not belong together" in fake.take_misuse()[0]
    ok(cu.cuModuleUnload(module))
    ok(cu.cuCtxDestroy(context))
