"""Lanes over worker processes: conformance, death and replacement, placement, what they cost and leave behind."""

import gc
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from smpart.errors import SmpartError
from smpart.partition import Shape, Side, Split, Work, open_backend
from smpart.partition.cores import Cores
from smpart.runtime.children import Zygote
from smpart.runtime.crew import CoreCrew
from smpart.runtime.processes import ProcessLanes
from smpart.runtime.segments import SharedSegment

sys.path.insert(0, str(Path(__file__).parents[1] / "partition"))
from conformance import PATIENCE, Case, Gate, checks, collect, exclusive, shared, work

sys.path.pop(0)

HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def toy_bodies_can_be_imported(monkeypatch):
    monkeypatch.syspath_prepend(str(HERE))


def open_lanes(body: str = "make", args=None, segments=None) -> ProcessLanes:
    backend = open_backend("cores")
    assert isinstance(backend, Cores)
    crew = CoreCrew(backend.device(), backend.splits(), f"toy_bodies:{body}", backend.placement(overlap=True), args)
    return ProcessLanes(crew, segments or {})


@pytest.fixture
def lanes():
    lanes = open_lanes()
    yield lanes
    lanes.close()


@pytest.fixture
def gate():
    gate = Gate()
    yield gate
    gate.close()


decode_gate = gate


def ask(lanes: ProcessLanes, side: Side, verb: str, argument=None, split: Split | None = None):
    lanes.launch(work(0, side, split or exclusive(lanes, side), (verb, argument)))
    (completion,) = collect(lanes, 1)
    assert completion.fault is None, completion.fault
    return completion.result


def until(condition) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        os.sched_yield()


def ended(process: psutil.Process) -> bool:
    """Whether it runs no more, reaped or not; it may be reaped between two looks."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.parametrize("check", checks, ids=lambda check: check.__name__)
def test_conformance(check):
    check(Case("processes", open_lanes, virtual=False))


def test_two_processes_that_are_neither_this_one_nor_each_other(lanes):
    pids = {ask(lanes, side, "where")[0] for side in Side}
    assert pids == {lanes.pid(side) for side in Side}
    assert len(pids | {os.getpid()}) == 3


def test_both_lanes_compute_at_once_in_shared_memory():
    segment = SharedSegment.create(4096, "flags")
    lanes = open_lanes(segments={"flags": segment})
    try:
        split = shared(lanes)
        lanes.launch(work(1, Side.PREFILL, split, ("meet", (0, 1))))
        lanes.launch(work(2, Side.DECODE, split, ("meet", (1, 0))))
        assert [c.result for c in collect(lanes, 2)] == [True, True]
        assert bytes(segment.buffer[:3]) == b"\1\1\0"
    finally:
        lanes.close()
        segment.close()


def test_every_compute_thread_follows_the_split(lanes):
    for split in (exclusive(lanes, Side.DECODE), shared(lanes), exclusive(lanes, Side.DECODE), shared(lanes)):
        cpus = sorted(lanes._crew._placement.cpus(Side.DECODE, split))
        threads = ask(lanes, Side.DECODE, "compute", split=split)
        assert all(affinity == cpus for affinity in threads)
        _, affinity, count = ask(lanes, Side.DECODE, "where", split=split)
        assert (affinity, count) == (cpus, split.decode)


def test_times_are_of_the_run_alone_on_this_clock(lanes, gate):
    split = exclusive(lanes, Side.DECODE)
    before = lanes.now()
    lanes.launch(work(1, Side.DECODE, split, ("gate", gate.path)))
    lanes.launch(work(2, Side.DECODE, split))
    gate.gather(1)
    opened = lanes.now()
    gate.open()
    first, second = collect(lanes, 2)
    assert before <= first.started <= opened <= first.finished <= second.started <= second.finished <= lanes.now()


def test_large_payloads_and_results(lanes):
    large = os.urandom(4 << 20)
    assert ask(lanes, Side.DECODE, "echo", large) == ("decode", large)


def test_a_payload_that_cannot_be_sent_was_not_launched(lanes):
    for _ in range(3):
        with pytest.raises(Exception, match="lambda"):
            lanes.launch(work(0, Side.DECODE, exclusive(lanes, Side.DECODE), lambda: None))
    assert ask(lanes, Side.DECODE, "echo") == ("decode", None)


def test_a_result_that_cannot_be_sent_fails_its_work_only(lanes):
    lanes.launch(work(1, Side.DECODE, exclusive(lanes, Side.DECODE), ("unpicklable", None)))
    (completion,) = collect(lanes, 1)
    assert completion.fault is not None and not completion.fault.lost
    assert ask(lanes, Side.DECODE, "echo") == ("decode", None)


class TestDeath:
    def test_idle(self, lanes):
        old = lanes.pid(Side.DECODE)
        os.kill(old, signal.SIGKILL)
        until(lambda: lanes.wait(lanes.now()) == [] and lanes.pid(Side.DECODE) != old)
        assert ask(lanes, Side.DECODE, "where")[0] == lanes.pid(Side.DECODE)

    def test_running_and_queued_works_are_lost_and_the_other_lane_goes_on(self, lanes, gate, decode_gate):
        split, neighbour = shared(lanes), lanes.pid(Side.PREFILL)
        lanes.launch(work(1, Side.PREFILL, split, ("gate", gate.path)))
        gate.gather(1)
        lanes.launch(work(2, Side.DECODE, split, ("gate", decode_gate.path)))
        lanes.launch(work(3, Side.DECODE, split))
        decode_gate.gather(1)
        os.kill(lanes.pid(Side.DECODE), signal.SIGKILL)
        lost = collect(lanes, 2)
        assert [c.work.id for c in lost] == [2, 3]
        for completion in lost:
            assert completion.fault is not None and completion.fault.lost
            assert "SIGKILL" in completion.fault.message and "\n" not in completion.fault.message
        # The replacement works while the neighbour still stands where it stood.
        assert ask(lanes, Side.DECODE, "where", split=split)[1] == sorted(
            lanes._crew._placement.cpus(Side.DECODE, split)
        )
        gate.open()
        (kept,) = collect(lanes, 1)
        assert (kept.work.id, kept.fault) == (1, None)
        assert lanes.pid(Side.PREFILL) == neighbour

    def test_before_it_is_noticed_launches_are_taken_and_come_back_lost(self, lanes):
        child = psutil.Process(lanes.pid(Side.DECODE))
        child.kill()
        until(lambda: ended(child))
        lanes.launch(work(1, Side.DECODE, exclusive(lanes, Side.DECODE)))
        (lost,) = collect(lanes, 1)
        assert lost.fault is not None and lost.fault.lost
        assert ask(lanes, Side.DECODE, "echo", 1) == ("decode", 1)

    def test_an_answer_given_before_death_counts(self, lanes):
        split = exclusive(lanes, Side.DECODE)
        lanes.launch(work(1, Side.DECODE, split))
        lanes.launch(work(2, Side.DECODE, split, ("exit", 7)))
        first, second = collect(lanes, 2)
        assert first.fault is None and first.result == ("decode", None)
        assert second.fault is not None and second.fault.lost and "exited with code 7" in second.fault.message

    def test_a_segmentation_fault_has_its_name(self, lanes):
        lanes.launch(work(1, Side.DECODE, exclusive(lanes, Side.DECODE), ("crash", None)))
        (lost,) = collect(lanes, 1)
        assert lost.fault is not None and "SIGSEGV" in lost.fault.message

    def test_the_replacement_sees_the_same_memory(self):
        segment = SharedSegment.create(4096, "flags")
        segment.buffer[0] = 41
        lanes = open_lanes(segments={"flags": segment})
        try:
            assert ask(lanes, Side.DECODE, "sum", "flags") == 41
            os.kill(lanes.pid(Side.DECODE), signal.SIGKILL)
            segment.buffer[1] = 1
            lanes.launch(work(1, Side.DECODE, exclusive(lanes, Side.DECODE)))
            collect(lanes, 1)
            assert ask(lanes, Side.DECODE, "sum", "flags") == 42
        finally:
            lanes.close()
            segment.close()

    def test_again_and_again_is_an_error_in_the_end(self, lanes):
        split = exclusive(lanes, Side.DECODE)
        with pytest.raises(SmpartError, match=r"decode lane's worker ended 5 times .* exited with code 3"):
            for i in range(5):
                lanes.launch(work(i, Side.DECODE, split, ("exit", 3)))
                collect(lanes, 1)
        assert lanes.wait(None) == []

    @pytest.mark.slow
    def test_the_zygote_too(self, lanes):
        zygote = Zygote.shared().pid
        os.kill(zygote, signal.SIGKILL)
        workers = [psutil.Process(lanes.pid(side)) for side in Side if psutil.pid_exists(lanes.pid(side))]
        until(lambda: all(ended(worker) for worker in workers))
        for side in Side:
            lanes.launch(work(len(side), side, shared(lanes)))
        assert [c.fault is not None and c.fault.lost for c in collect(lanes, 2)] == [True, True]
        assert [ask(lanes, side, "echo", 5) for side in Side] == [("prefill", 5), ("decode", 5)]
        assert Zygote.shared().pid != zygote


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("broken", r"prefill|decode.* cannot start: RuntimeError: no body today"),
        ("dies", "ended 5 times"),
        ("missing", "cannot start: AttributeError"),
    ],
)
def test_a_worker_that_cannot_start_is_a_clear_error(body, why):
    with pytest.raises(SmpartError, match=why):
        open_lanes(body)


def test_close_lets_idle_bodies_close(tmp_path):
    lanes = open_lanes(args={"closed": str(tmp_path)})
    lanes.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["decode", "prefill"]


def test_close_does_not_wait_for_a_running_body(gate):
    lanes = open_lanes()
    worker = psutil.Process(lanes.pid(Side.DECODE))
    lanes.launch(work(1, Side.DECODE, exclusive(lanes, Side.DECODE), ("gate", gate.path)))
    gate.gather(1)
    lanes.close()
    until(lambda: ended(worker))
    lanes.wake()


def test_nothing_is_left_behind():
    open_lanes().close()
    gc.collect()
    fds, zygote = sorted(path.name for path in Path("/proc/self/fd").iterdir()), psutil.Process(Zygote.shared().pid)
    theirs = zygote.num_fds()
    for _ in range(3):
        lanes = open_lanes()
        os.kill(lanes.pid(Side.PREFILL), signal.SIGKILL)
        lanes.launch(work(1, Side.PREFILL, exclusive(lanes, Side.PREFILL)))
        collect(lanes, 1)
        lanes.close()
    gc.collect()
    assert sorted(path.name for path in Path("/proc/self/fd").iterdir()) == fds
    assert zygote.num_fds() == theirs
    assert zygote.children() == []


def test_an_interrupt_at_the_terminal_is_the_engines_affair(lanes):
    for side in Side:
        os.kill(lanes.pid(side), signal.SIGINT)
    os.kill(Zygote.shared().pid, signal.SIGINT)
    pids = [lanes.pid(side) for side in Side]
    assert os.getsid(pids[0]) == os.getsid(pids[1]) != os.getsid(0)
    assert [ask(lanes, side, "where")[0] for side in Side] == pids


def test_an_idle_worker_does_not_burn_its_core(lanes):
    whole = exclusive(lanes, Side.DECODE)
    ask(lanes, Side.DECODE, "compute", split=whole)
    worker = psutil.Process(lanes.pid(Side.DECODE))
    before = sum(worker.cpu_times()[:2])
    lanes.wait(lanes.now() + 0.3)
    assert sum(worker.cpu_times()[:2]) - before <= 0.05


def test_a_second_worker_takes_little_memory_of_its_own(lanes):
    for side in Side:
        ask(lanes, side, "compute")
    assert all(psutil.Process(lanes.pid(side)).memory_full_info().uss <= 40 << 20 for side in Side)


SCRIPT = """
import os, sys
from smpart.partition import Shape, Side, Split, Work, open_backend
from smpart.runtime.crew import CoreCrew
from smpart.runtime.processes import ProcessLanes
from smpart.runtime.children import Zygote
from smpart.runtime.crew import CoreCrew

backend = open_backend("cores")
lanes = ProcessLanes(CoreCrew(backend.device(), backend.splits(), "toy_bodies:make", backend.placement()))
whole = Split(0, backend.device().units)
lanes.launch(Work(1, Side.DECODE, whole, Shape.decode(1, 1), 1.0, ("echo", "hello")))
(done,) = lanes.wait(None)
print(done.result, Zygote.shared().pid, *(lanes.pid(side) for side in Side), flush=True)
"""


def script(tmp_path: Path, rest: str) -> subprocess.Popen[str]:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT + textwrap.dedent(rest))
    environment = {**os.environ, "PYTHONPATH": str(HERE)}
    return subprocess.Popen(
        [sys.executable, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )


def said(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """The zygote and the workers of a script that works."""
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.startswith("('decode', 'hello')"), line
    return [psutil.Process(int(pid)) for pid in line.split()[2:]]


@pytest.mark.slow
def test_a_script_without_main_guard_works_and_leaves_nothing(tmp_path):
    with script(tmp_path, "sys.stdin.read()") as process:
        family = said(process)
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(PATIENCE) == 0
    assert len(family) == 3
    until(lambda: all(ended(member) for member in family))


def test_workers_end_with_an_engine_that_is_killed(tmp_path):
    # The script's fork holds copies of all its sockets: an end of stream alone would not come.
    rest = """
        if os.fork() == 0:
            sys.stdin.read()
            os._exit(0)
        sys.stdin.read()
    """
    with script(tmp_path, rest) as process:
        family = said(process)
        process.kill()
        process.wait(PATIENCE)
        until(lambda: all(ended(member) for member in family))


def test_shape_of_work_is_not_sent(lanes):
    """Only payload and place travel: the completion carries the caller's own work object."""
    mine = Work(1, Side.DECODE, exclusive(lanes, Side.DECODE), Shape.decode(3, 9), 0.5, ("echo", None))
    lanes.launch(mine)
    assert collect(lanes, 1)[0].work is mine
