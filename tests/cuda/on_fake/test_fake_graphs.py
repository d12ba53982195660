"""The fake driver's captures and graphs: what breaks a capture, and where a captured kernel runs."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from cuda.bindings import driver as cu
from cuda_calls import PTX, Lanes, code, current, kernel, launch, ok
from fake_cuda import Fake

GLOBAL = cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL
LOCAL = cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
RELAXED = cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED


@pytest.fixture
def work(lanes: Lanes) -> Iterator[Any]:
    module = ok(cu.cuModuleLoadData(PTX))
    yield kernel(module)
    lanes.drain()
    ok(cu.cuModuleUnload(module))


def capture(stream: Any, *functions: Any, mode: Any = GLOBAL) -> Any:
    ok(cu.cuStreamBeginCapture(stream, mode))
    for function in functions:
        ok(launch(function, stream))
    return ok(cu.cuStreamEndCapture(stream))


def test_a_captured_kernel_runs_in_the_context_of_its_capture(work: Any, lanes: Lanes, fake: Fake) -> None:
    graph = capture(lanes.streams[0], work, work)
    assert fake.launches() == []
    nodes, count = ok(cu.cuGraphGetNodes(graph, 2))
    assert count == 2
    for node in nodes:
        assert ok(cu.cuGraphNodeGetType(node)) == cu.CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL
        params = ok(cu.cuGraphKernelNodeGetParams(node))
        assert (int(params.ctx), int(params.func)) == (int(lanes.contexts[0]), int(work))
    executable = ok(cu.cuGraphInstantiate(graph, 0))
    ok(cu.cuGraphDestroy(graph))
    ok(cu.cuGraphLaunch(executable, lanes.streams[1]))  # the wrong lane: the driver does not mind
    ok(cu.cuStreamSynchronize(lanes.streams[1]))
    for ran in fake.launches():
        assert (ran.context, ran.stream_context) == (int(lanes.contexts[0]), int(lanes.contexts[1]))
        assert (len(ran.sms), ran.from_graph) == (48, True)
    assert len(fake.launches()) == 2
    ok(cu.cuGraphExecDestroy(executable))


def test_a_fork_joins_the_capture_and_must_come_back(work: Any, lanes: Lanes, fake: Fake) -> None:
    a, b = lanes.streams
    for joins in (True, False):
        ok(cu.cuStreamBeginCapture(a, GLOBAL))
        ok(cu.cuEventRecord(lanes.events[0], a))
        ok(cu.cuStreamWaitEvent(b, lanes.events[0], 0))
        ok(launch(work, b))
        if joins:
            ok(cu.cuEventRecord(lanes.events[1], b))
            ok(cu.cuStreamWaitEvent(a, lanes.events[1], 0))
            graph = ok(cu.cuStreamEndCapture(a))
            (node,), _ = ok(cu.cuGraphGetNodes(graph, 1))
            assert int(ok(cu.cuGraphKernelNodeGetParams(node)).ctx) == int(lanes.contexts[1])
            ok(cu.cuGraphDestroy(graph))
        else:
            assert code(cu.cuStreamEndCapture(a)) == "STREAM_CAPTURE_UNJOINED"
    assert fake.take_misuse() == ["cuStreamEndCapture: a fork of the capture was not joined"]
    assert "graph" not in fake.live()


BREAKERS: dict[str, Callable[[Lanes], tuple[Any, ...]]] = {
    "an allocation": lambda lanes: cu.cuMemAlloc(64),
    "a query of an event": lambda lanes: cu.cuEventQuery(lanes.events[1]),
    "waiting for an event": lambda lanes: cu.cuEventSynchronize(lanes.events[1]),
    "waiting for a stream": lambda lanes: cu.cuStreamSynchronize(lanes.streams[1]),
    "waiting for the stream itself": lambda lanes: cu.cuStreamSynchronize(lanes.streams[0]),
    "waiting for the device": lambda lanes: cu.cuCtxSynchronize(),
    "recording its green context": lambda lanes: cu.cuGreenCtxRecordEvent(lanes.greens[0], lanes.events[0]),
}


@pytest.mark.parametrize("breaker", BREAKERS.values(), ids=list(BREAKERS))
def test_what_breaks_a_capture(work: Any, lanes: Lanes, fake: Fake, breaker: Callable[..., Any]) -> None:
    ok(cu.cuStreamBeginCapture(lanes.streams[0], GLOBAL))
    assert code(breaker(lanes)) == "STREAM_CAPTURE_UNSUPPORTED"
    assert code(launch(work, lanes.streams[0])) == "STREAM_CAPTURE_INVALIDATED"
    assert code(cu.cuStreamEndCapture(lanes.streams[0])) == "STREAM_CAPTURE_INVALIDATED"
    assert fake.take_misuse()
    ok(launch(work, lanes.streams[0]))  # the stream is an ordinary one again


@pytest.mark.parametrize(("mode", "breaks"), [(GLOBAL, True), (LOCAL, False), (RELAXED, False)])
def test_another_thread_breaks_a_global_capture_only(lanes: Lanes, fake: Fake, mode: Any, breaks: bool) -> None:
    answers: list[str] = []
    ok(cu.cuStreamBeginCapture(lanes.streams[0], mode))
    thread = threading.Thread(target=lambda: answers.append(code(cu.cuEventQuery(lanes.events[1]))))
    thread.start()
    thread.join()
    ended = cu.cuStreamEndCapture(lanes.streams[0])
    if breaks:
        assert (answers, code(ended)) == (["STREAM_CAPTURE_UNSUPPORTED"], "STREAM_CAPTURE_INVALIDATED")
        assert fake.take_misuse() == ["cuEventQuery: stream 1 is being captured by another thread"]
    else:
        assert answers == ["SUCCESS"]
        ok(cu.cuGraphDestroy(ok(ended)))


def test_a_capture_takes_no_event_from_outside(work: Any, lanes: Lanes, fake: Fake) -> None:
    ok(cu.cuEventRecord(lanes.events[1], lanes.streams[1]))
    ok(cu.cuStreamBeginCapture(lanes.streams[0], GLOBAL))
    answer = cu.cuStreamWaitEvent(lanes.streams[0], lanes.events[1], 0)
    assert code(answer) == "STREAM_CAPTURE_ISOLATION"
    assert code(cu.cuStreamEndCapture(lanes.streams[0])) == "STREAM_CAPTURE_INVALIDATED"
    assert len(fake.take_misuse()) == 1


def test_a_captured_event_has_no_completion(lanes: Lanes, fake: Fake) -> None:
    ok(cu.cuStreamBeginCapture(lanes.streams[0], RELAXED))
    ok(cu.cuEventRecord(lanes.events[0], lanes.streams[0]))
    graph = ok(cu.cuStreamEndCapture(lanes.streams[0]))
    assert code(cu.cuEventQuery(lanes.events[0])) == "CAPTURED_EVENT"
    assert len(fake.take_misuse()) == 1
    ok(cu.cuGraphDestroy(graph))


def test_who_may_begin_and_end(primary: Any, lanes: Lanes, fake: Fake) -> None:
    a, b = lanes.streams
    assert code(cu.cuStreamBeginCapture(0, GLOBAL)) == "STREAM_CAPTURE_UNSUPPORTED"
    assert code(cu.cuStreamEndCapture(a)) == "ILLEGAL_STATE"
    ok(cu.cuStreamBeginCapture(a, GLOBAL))
    assert code(cu.cuStreamBeginCapture(a, GLOBAL)) == "ILLEGAL_STATE"
    answers: list[str] = []
    thread = threading.Thread(target=lambda: answers.append(code(cu.cuStreamEndCapture(a))))
    thread.start()
    thread.join()
    assert answers == ["STREAM_CAPTURE_WRONG_THREAD"]
    ok(cu.cuGraphDestroy(ok(cu.cuStreamEndCapture(a))))
    assert len(fake.take_misuse()) == 3
    assert ok(cu.cuStreamIsCapturing(b)) == cu.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE


def test_launches_of_one_executable_follow_each_other(work: Any, lanes: Lanes, fake: Fake) -> None:
    executable = ok(cu.cuGraphInstantiate(graph := capture(lanes.streams[0], work), 0))
    with fake.paused(lanes.streams[0]):
        ok(cu.cuGraphLaunch(executable, lanes.streams[0]))
        ok(cu.cuGraphLaunch(executable, lanes.streams[1]))
        assert code(cu.cuStreamQuery(lanes.streams[1])) == "NOT_READY"
    lanes.drain()
    assert [ran.stream for ran in fake.launches()] == [int(stream) for stream in lanes.streams]
    ok(cu.cuGraphExecDestroy(executable))
    ok(cu.cuGraphDestroy(graph))


def test_a_graph_does_not_outlive_its_context(primary: Any, fake: Fake) -> None:
    module, made = ok(cu.cuModuleLoadData(PTX)), Lanes()
    executable = ok(cu.cuGraphInstantiate(graph := capture(made.streams[0], kernel(module)), 0))
    ok(cu.cuGraphDestroy(graph))
    made.close()
    assert fake.take_misuse() == ["cuGreenCtxDestroy: executable graph 1 runs in it"]
    stream = ok(cu.cuStreamCreate(1))
    assert code(cu.cuGraphLaunch(executable, stream)) == "CONTEXT_IS_DESTROYED"
    assert fake.take_misuse() == ["cuGraphLaunch: the graph has a node whose context is gone"]
    ok(cu.cuGraphExecDestroy(executable))
    ok(cu.cuStreamDestroy(stream))
    ok(cu.cuModuleUnload(module))


def test_an_external_event_is_recorded_by_each_launch(work: Any, lanes: Lanes, fake: Fake) -> None:
    with current(lanes.contexts[0]):
        start = ok(cu.cuEventCreate(0))
    ok(cu.cuStreamBeginCapture(lanes.streams[0], GLOBAL))
    ok(cu.cuEventRecordWithFlags(start, lanes.streams[0], 1))
    ok(launch(work, lanes.streams[0]))
    ok(cu.cuEventRecordWithFlags(lanes.events[0], lanes.streams[0], 1))
    graph = ok(cu.cuStreamEndCapture(lanes.streams[0]))
    executable = ok(cu.cuGraphInstantiate(graph, 0))
    for _ in range(2):
        ok(cu.cuGraphLaunch(executable, lanes.streams[0]))
        ok(cu.cuEventSynchronize(lanes.events[0]))
        assert ok(cu.cuEventElapsedTime(start, lanes.events[0])) >= 0
    lanes.drain()
    for end, handle in ((cu.cuGraphExecDestroy, executable), (cu.cuGraphDestroy, graph), (cu.cuEventDestroy, start)):
        ok(end(handle))


def test_memory_of_graphs_and_contexts_is_counted_if_told_so(fake: Fake) -> None:
    fake.reset(graph_bytes=1 << 20, context_bytes=8 << 20)
    ok(cu.cuCtxSetCurrent(ok(cu.cuDevicePrimaryCtxRetain(0))))
    free = ok(cu.cuMemGetInfo())[0]
    lanes = Lanes()
    graph = capture(lanes.streams[0])
    executable = ok(cu.cuGraphInstantiate(graph, 0))
    assert free - ok(cu.cuMemGetInfo())[0] == 17 << 20
    ok(cu.cuGraphExecDestroy(executable))
    ok(cu.cuGraphDestroy(graph))
    lanes.close()
    assert ok(cu.cuMemGetInfo())[0] == free
    ok(cu.cuCtxSetCurrent(cu.CUcontext(0)))
    ok(cu.cuDevicePrimaryCtxRelease(0))
