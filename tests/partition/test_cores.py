"""Pinning live threads and processes to cores, read back from the kernel."""

import os
import subprocess
import sys
import threading

import pytest

from smpart.errors import BackendUnavailable, UsageError
from smpart.partition import Side, Split, open_backend
from smpart.partition.affinity import pin_process, pin_tids, read_process, threads_of
from smpart.partition.cores import CorePlacement, Cores, ThreadPlacement
from smpart.partition.cpu import Core, Cpus

two_cores = pytest.mark.skipif(len(Cpus.usable().cores) < 2, reason="needs two usable cores")

BUSY_WORKER = """
import os, sys, threading
stop = threading.Event()
threads = [threading.Thread(target=stop.wait) for _ in range(4)]
for thread in threads: thread.start()
def churn():
    while not stop.is_set():
        short = threading.Thread(target=int); short.start(); short.join()
churning = threading.Thread(target=churn); churning.start()
print("ready", flush=True)
sys.stdin.read()
stop.set()
"""


@pytest.fixture
def worker():
    """A live process with several threads, one of which keeps starting others."""
    process = subprocess.Popen([sys.executable, "-c", BUSY_WORKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"ready\n"
    yield process
    process.communicate()


@two_cores
def test_every_thread_of_a_live_process_moves(worker):
    placement = open_backend("cores").placement()
    total = len(placement.cores)
    ids = [core.id for core in placement.cores]
    for split in (Split(1, total - 1), Split(total - 1, 1), Split(total, 0)):
        for side in (side for side in Side if split.units(side)):
            placement.pin_process(worker.pid, side, split)
            assert placement.read_back(worker.pid) == {ids[i] for i in split.indices(side, total)}
    assert len(threads_of(worker.pid)) >= 6


def test_a_process_that_is_gone(worker):
    worker.communicate()
    with pytest.raises(ProcessLookupError):
        pin_process(worker.pid, {0})
    with pytest.raises(ProcessLookupError):
        read_process(worker.pid)


def test_a_thread_that_ended_is_passed_over():
    thread = threading.Thread(target=int)
    thread.start()
    thread.join()
    pin_tids([thread.native_id], os.sched_getaffinity(0))


def test_cpus_that_do_not_exist_are_refused(worker):
    with pytest.raises(BackendUnavailable, match="cannot pin"):
        pin_process(worker.pid, {4095})


def test_a_mask_the_system_cuts_down_is_not_accepted_silently(worker):
    allowed = min(os.sched_getaffinity(0))
    with pytest.raises(BackendUnavailable, match=r"the system gave"):
        pin_process(worker.pid, {allowed, 1023})


def test_sides_are_whole_cores_with_their_hyperthreads():
    placement = CorePlacement((Core(0, (0, 4)), Core(1, (1, 5)), Core(2, (2, 6))))
    assert placement.cpus(Side.PREFILL, Split(1, 2)) == {0, 4}
    assert placement.cpus(Side.DECODE, Split(1, 2)) == {1, 5, 2, 6}
    assert placement.units({4, 2}) == {0, 2}
    assert placement.units({4, 99}) == {0, 99}, "a CPU outside every unit must show"


def test_splits_that_cannot_be_placed():
    one = CorePlacement((Core(3, (3,)),))
    assert one.cpus(Side.DECODE, Split(0, 1)) == {3}
    with pytest.raises(UsageError, match="only one core"):
        one.cpus(Side.DECODE, Split(1, 1))
    with pytest.raises(UsageError, match="gives decode no core"):
        one.cpus(Side.DECODE, Split(1, 0))
    with pytest.raises(UsageError, match="add up to 2"):
        CorePlacement((Core(0, (0,)), Core(1, (1,)))).cpus(Side.DECODE, Split(1, 2))


def test_sides_overlap_only_where_that_was_allowed():
    both = CorePlacement((Core(0, (0,)), Core(1, (1,))), overlap=True)
    assert both.cpus(Side.DECODE, Split(1, 2)) == {0, 1} and both.cpus(Side.PREFILL, Split(1, 2)) == {0}
    assert both.cpus(Side.PREFILL, Split(1, 1)) == {0}
    for wrong in (Split(3, 1), Split(1, 0), Split(3, 3)):
        with pytest.raises(UsageError, match="add up to 2"):
            both.cpus(Side.PREFILL, wrong)
    assert CorePlacement((Core(3, (3,)),), overlap=True).cpus(Side.DECODE, Split(1, 1)) == {3}


def test_one_core_has_the_exclusive_splits_only():
    backend = Cores(Cpus((Core(5, (5, 9)),), allowed=(5, 9), quota=None, name="tiny"), memory_bytes=1)
    assert backend.splits() == (Split(0, 1), Split(1, 0))
    assert backend.device().unit_ids == (5,)
    assert backend.device().facts["threads_per_core"] == 2


@two_cores
def test_a_lanes_team_moves_with_it():
    """Threads that a lane starts when told its size are pinned with it, later moves included; strangers are not."""
    cores = open_backend("cores").placement()
    total, stop, moved = len(cores.cores), threading.Event(), threading.Event()
    team = []

    def start_team(size):
        while len(team) < size:
            team.append(threading.Thread(target=stop.wait))
            team[-1].start()

    placement = ThreadPlacement(cores, start_team)
    stranger = threading.Thread(target=stop.wait)
    stranger.start()

    def lane():
        placement.place(Side.PREFILL, Split(1, total - 1))
        placement.place(Side.PREFILL, Split(total, 0))
        placement.place(Side.PREFILL, Split(1, total - 1))
        moved.set()
        stop.wait()

    thread = threading.Thread(target=lane)
    thread.start()
    assert moved.wait(60)
    try:
        first = set(cores.cores[0].cpus)
        assert len(team) == total
        assert [os.sched_getaffinity(each.native_id) for each in (thread, *team)] == [first] * (total + 1)
        assert os.sched_getaffinity(stranger.native_id) == os.sched_getaffinity(0)
        assert placement.realised(Side.PREFILL) == {cores.cores[0].id}
        assert placement.realised(Side.DECODE) == frozenset()
    finally:
        stop.set()
        for each in (thread, stranger, *team):
            each.join()
