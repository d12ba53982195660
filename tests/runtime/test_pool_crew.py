"""Lanes whose sides have a worker for every share, and a first process that all of them need."""

import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from smpart.errors import SmpartError
from smpart.partition import Side, open_backend
from smpart.partition.cores import Cores
from smpart.runtime.crew import CoreCrew, Seat
from smpart.runtime.processes import ProcessLanes

sys.path.insert(0, str(Path(__file__).parents[1] / "partition"))
from conformance import Case, Gate, checks, collect, exclusive, shared, work

sys.path.pop(0)

HERE = Path(__file__).parent
ENTRY = "smpart.runtime.worker:main"
LOST = 70


@pytest.fixture(autouse=True)
def toy_bodies_can_be_imported(monkeypatch):
    monkeypatch.syspath_prepend(str(HERE))


class PoolCrew(CoreCrew):
    """Seat 0 works for nobody. What happens is in `told`: "ready 0", "start 1", "kill"."""

    def __init__(self, args=None, first: str = "make"):
        backend = open_backend("cores")
        assert isinstance(backend, Cores)
        super().__init__(backend.device(), backend.splits(), "toy_bodies:make", backend.placement(), args)
        self.shares = [(side, split) for side in Side for split in backend.splits() if split.units(side)]
        self.seats = (
            Seat("the first", ENTRY),
            *(Seat(f"{side} on {split}", ENTRY, follows=True) for side, split in self.shares),
        )
        self.told, self.first = [], first

    def seat(self, side, split):
        return 1 + self.shares.index((side, split))

    def fatal(self, seat, code):
        return seat == 0 or code == LOST

    def first_message(self, seat, segments, last):
        self.told.append(f"start {seat}")
        side = self.shares[seat - 1][0] if seat else Side.DECODE
        init = super().first_message(list(Side).index(side), segments, last)
        return init if seat else replace(init, body=f"toy_bodies:{self.first}", args=self._args and self._args["first"])

    def ready(self, seat, info):
        self.told.append(f"ready {seat}")

    def before_kill(self, pid):
        self.told.append("kill")


def open_lanes(**options) -> ProcessLanes:
    return ProcessLanes(PoolCrew(**options))


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


def settle(lanes, condition):
    while not condition():
        assert lanes.wait(lanes.now() + 0.01) == []


@pytest.mark.parametrize("check", checks, ids=lambda check: check.__name__)
def test_conformance(check):
    check(Case("pool", open_lanes, virtual=False))


def test_the_first_is_ready_before_any_other_starts(lanes):
    told = lanes._crew.told
    assert told[:2] == ["start 0", "ready 0"]
    assert sorted(told[2:]) == sorted(
        f"{word} {seat}" for word in ("start", "ready") for seat in range(1, 1 + len(lanes._crew.shares))
    )


def test_works_of_one_side_run_in_order_in_whichever_worker(lanes, gate):
    one, other = exclusive(lanes, Side.PREFILL), shared(lanes)
    lanes.launch(work(1, Side.PREFILL, one, ("gate", gate.path)))
    gate.gather(1)
    lanes.launch(work(2, Side.PREFILL, other, ("where", None)))
    here = lanes.pid(Side.PREFILL)
    gate.open()
    first, second = collect(lanes, 2)
    assert (first.work.id, second.work.id) == (1, 2) and second.started >= first.finished
    assert second.result[0] == lanes.pid(Side.PREFILL) != here
    assert lanes.body(Side.PREFILL, one) != lanes.body(Side.PREFILL, other)


def test_what_is_held_behind_a_lost_work_is_lost_with_it(lanes, gate):
    one, other = exclusive(lanes, Side.PREFILL), shared(lanes)
    bodies = [lanes.body(Side.PREFILL, split) for split in (one, other)]
    beside = lanes.body(Side.DECODE, other)
    lanes.launch(work(1, Side.PREFILL, one, ("gate", gate.path)))
    gate.gather(1)
    lanes.launch(work(2, Side.PREFILL, other))
    pids = lanes.pids()
    os.kill(lanes.pid(Side.PREFILL), signal.SIGKILL)
    done = collect(lanes, 2)
    assert {c.work.id for c in done} == {1, 2} and all(c.fault and c.fault.lost for c in done)
    # Neither body knows what these works told it; the second one is nevertheless the same process.
    assert not set(bodies) & {lanes.body(Side.PREFILL, split) for split in (one, other)}
    assert lanes.body(Side.DECODE, other) == beside and lanes.epoch == 0
    assert len(set(pids) - set(lanes.pids())) == 1
    lanes.launch(work(3, Side.PREFILL, other))
    lanes.launch(work(4, Side.PREFILL, one))
    assert [c.fault for c in collect(lanes, 2)] == [None, None]


@pytest.mark.parametrize("how", ["the first is killed", "a worker loses the device"])
def test_with_what_all_need_everything_starts_anew(lanes, gate, how):
    split = shared(lanes)
    pids, bodies = lanes.pids(), [lanes.body(side, split) for side in Side]
    lanes.launch(work(1, Side.DECODE, split, ("gate", gate.path)))
    gate.gather(1)
    lanes.launch(work(2, Side.PREFILL, split, ("exit", LOST) if how.startswith("a worker") else ("gate", gate.path)))
    if how.startswith("the first"):
        os.kill(pids[0], signal.SIGKILL)
    lost = collect(lanes, 2)
    assert {c.work.id for c in lost} == {1, 2} and all(c.fault and c.fault.lost for c in lost)
    assert lanes.epoch == 1 and "kill" in lanes._crew.told
    # Before the next ones have even started: what is launched now must tell them everything.
    assert not set(bodies) & {lanes.body(side, split) for side in Side}
    lanes.launch(work(3, Side.PREFILL, split))  # waits for its worker, and that for the first
    (done,) = collect(lanes, 1)
    assert done.fault is None
    assert not set(pids) & set(lanes.pids())
    assert lanes._crew.told.count("ready 0") == 2


def test_an_idle_worker_is_replaced_and_its_body_is_another(lanes):
    split = shared(lanes)
    before, pids = lanes.body(Side.DECODE, split), lanes.pids()
    seat = lanes._crew.seat(Side.DECODE, split)
    os.kill(pids[seat], signal.SIGKILL)
    settle(lanes, lambda: lanes.pids()[seat] != pids[seat])
    assert lanes.body(Side.DECODE, split) != before
    assert [a == b for a, b in zip(pids, lanes.pids(), strict=True)].count(False) == 1


def test_the_first_ends_last(tmp_path):
    first, others = tmp_path / "first", tmp_path / "others"
    first.mkdir()
    others.mkdir()
    lanes = open_lanes(args={"closed": str(others), "first": {"closed": str(first)}})
    lanes.close()
    ends = [path.stat().st_mtime_ns for path in others.iterdir()]
    (last,) = (path.stat().st_mtime_ns for path in first.iterdir())
    assert len(ends) == 2 and last > max(ends)


def test_a_first_that_cannot_start_leaves_nobody():
    with pytest.raises(SmpartError, match=r"^the first cannot start: RuntimeError: no body today$"):
        open_lanes(first="broken")
