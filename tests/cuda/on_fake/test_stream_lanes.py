"""Lanes on the streams of green contexts: the conformance suite, switches, and a device that is lost."""

import itertools
import sys
import threading
from typing import Any

import pytest
from conformance import Case, Gate, checks, collect, exclusive, shared, work
from fake_cuda import Fake
from on_stream import GreenLanes, OnDevice, OnStream

from smpart.errors import SmpartError
from smpart.partition import Side, Split
from smpart.partition.cuda.driver import driver
from smpart.partition.cuda.streams import StreamLanes
from smpart.partition.green import Green


@pytest.mark.drivers("12.4", "13.0", "13.1")
@pytest.mark.parametrize("check", checks, ids=lambda check: check.__name__)
def test_conformance(fake: Fake, check: Any) -> None:
    check(Case("green", GreenLanes, virtual=False))


@pytest.mark.parametrize(
    "check", [check for check in checks if "gate" not in check.__code__.co_varnames], ids=lambda check: check.__name__
)
def test_conformance_with_the_bodies_for_a_real_device(fake: Fake, check: Any) -> None:
    """All but what needs a kernel that really runs: see on_gpu/."""
    check(Case("green", lambda: GreenLanes(OnDevice), virtual=False))


@pytest.fixture
def lanes(fake: Fake) -> Any:
    lanes = GreenLanes()
    yield lanes
    lanes.close()


def test_a_switch_waits_on_the_device_and_makes_nothing(lanes: GreenLanes, fake: Fake) -> None:
    one, other = [split for split in lanes.splits() if not split.exclusive][:2]
    lanes.launch(work(1, Side.DECODE, one))
    collect(lanes, 1)
    _, end = fake.calls("cuEventRecord")
    fake.forget_calls()
    lanes.launch(work(2, Side.DECODE, other))
    collect(lanes, 1)
    (wait,) = fake.calls("cuStreamWaitEvent")
    assert wait[1:3] == (int(lanes.places.all()[Side.DECODE, other].stream), end[1])
    assert {name for name, *_ in fake.calls()} == {
        "cuStreamWaitEvent", "cuEventRecord", "cuLaunchHostFunc", "cuEventSynchronize", "cuEventElapsedTime",
    }  # fmt: skip


def test_the_marks_of_a_work_are_its_own_until_the_next_one_was_measured(lanes: GreenLanes, fake: Fake) -> None:
    """Events are made once, and used again only when nobody looks at them any more."""
    assert fake.live()["event"] == len(lanes.places.all()) * 2 * (lanes.depth + 1)
    split, gates = shared(lanes), [Gate() for _ in range(4)]
    for nth in (0, 1):
        lanes.launch(work(nth, Side.DECODE, split, ("gate", gates[nth].path)))
    done = []
    for nth in range(4):  # while the next one is held, and from the second on the one after it is queued as well
        gates[nth].gather(1)
        gates[nth].open()
        done += collect(lanes, 1)
        if nth + 2 < 4:
            lanes.launch(work(nth + 2, Side.DECODE, split, ("gate", gates[nth + 2].path)))
    assert [completion.work.id for completion in done] == [0, 1, 2, 3]
    assert all(completion.fault is None for completion in done)
    for before, after in itertools.pairwise(done):
        assert before.started <= before.finished <= after.started <= after.finished
    for gate in gates:
        gate.close()


def test_bodies_are_made_where_the_primary_context_is_current_and_stays_so(fake: Fake) -> None:
    def current() -> int:
        return int(driver()("cuCtxGetCurrent"))

    seen = []
    driver()("cuCtxSetCurrent", driver().api.CUcontext(0))
    lanes = GreenLanes(lambda side, places: seen.append(current()) or OnStream(side, places))
    assert [*seen, current()] == [int(lanes.places.primary)] * 3
    lanes.close()


def test_which_sides_meet_is_what_the_places_know(lanes: GreenLanes) -> None:
    lanes.places.learn({key: frozenset(key[1].indices(key[0], 132)) for key in lanes.places.all()})
    small, large = Split(8, 124), Split(64, 68)
    assert lanes.disjoint(small, large) is True and lanes.disjoint(large, small) is False


def test_each_side_has_one_body_for_life(lanes: GreenLanes) -> None:
    for side in Side:
        assert {lanes.body(side, split) for split in lanes.splits()} == {side}


def test_works_of_a_lane_run_in_order_across_a_switch(lanes: GreenLanes) -> None:
    one, other = [split for split in lanes.splits() if not split.exclusive][:2]
    gate = Gate()
    lanes.launch(work(1, Side.DECODE, one, ("gate", gate.path)))
    lanes.launch(work(2, Side.DECODE, other))
    gate.gather(1)
    assert lanes.wait(lanes.now() + 0.02) == []
    gate.open()
    assert [done.work.id for done in collect(lanes, 2)] == [1, 2]
    gate.close()


def test_lanes_of_two_splits_do_not_meet(lanes: GreenLanes) -> None:
    one, other = [split for split in lanes.splits() if not split.exclusive][:2]
    gate = Gate()
    lanes.launch(work(1, Side.PREFILL, one, ("gate", gate.path)))
    for split in (other, exclusive(lanes, Side.DECODE)):
        with pytest.raises(SmpartError, match="overlaps"):
            lanes.launch(work(2, Side.DECODE, split))
    gate.gather(1)
    gate.open()
    collect(lanes, 1)
    gate.close()


class Telling(threading.Condition):
    """Tells when somebody waits."""

    def __init__(self) -> None:
        super().__init__()
        self.entered = threading.Event()

    def wait(self, timeout: float | None = None) -> bool:
        self.entered.set()
        return super().wait(timeout)


@pytest.mark.parametrize("how", ["wake", "close"])
def test_a_wait_without_an_end_is_ended_from_another_thread(lanes: GreenLanes, how: str) -> None:
    changed = lanes._changed = Telling()
    ended: list[Any] = []
    waiting = threading.Thread(target=lambda: ended.append(lanes.wait(None)), daemon=True)
    waiting.start()
    assert changed.entered.wait(20)
    getattr(lanes, how)()
    waiting.join(20)
    assert ended == [[]]


def test_a_wait_until_the_past_only_looks(lanes: GreenLanes) -> None:
    assert lanes.wait(lanes.now() - 1e9) == []
    lanes.wake()
    assert lanes.wait(None) == []


def test_nothing_is_realised_before_the_first_work(lanes: GreenLanes) -> None:
    assert [lanes.realised(side) for side in Side] == [frozenset()] * 2


def test_what_cannot_be_queued_fails_alone(lanes: GreenLanes) -> None:
    split = shared(lanes)
    lanes.launch(work(1, Side.PREFILL, split, ("refuse", None)))
    lanes.launch(work(2, Side.PREFILL, split))
    bad, good = collect(lanes, 2)
    assert bad.fault is not None and not bad.fault.lost and "no such block" in bad.fault.message
    assert good.result == ("prefill", None)


@pytest.mark.parametrize("call", ["cuEventRecord", "cuEventSynchronize", "cuEventElapsedTime", "cuStreamWaitEvent"])
def test_a_failing_driver_loses_the_work_and_says_so(fake: Fake, call: str) -> None:
    lanes = GreenLanes()
    one, other = [split for split in lanes.splits() if not split.exclusive][:2]
    lanes.launch(work(1, Side.DECODE, one))
    collect(lanes, 1)
    fake.fail(call, code=700)
    lanes.launch(work(2, Side.DECODE, other))
    (lost,) = collect(lanes, 1)
    assert lost.fault is not None and lost.fault.lost and call in lost.fault.message
    with pytest.raises(SmpartError, match=f"device was lost .*{call}.*start this process again"):
        lanes.launch(work(3, Side.DECODE, other))
    lanes.close()
    fake.take_misuse()


def test_an_error_of_a_kernel_takes_both_lanes_with_it(fake: Fake) -> None:
    """It arrives at a later call, whoever makes that."""
    lanes = GreenLanes()
    split, gate = shared(lanes), Gate()
    for side in Side:
        lanes.launch(work(len(side), side, split, ("gate", gate.path)))
    gate.gather(2)
    fake.fail_async(700)
    gate.open()
    done = collect(lanes, 2)
    assert any(c.fault is not None and c.fault.lost for c in done)
    with pytest.raises(SmpartError, match="device was lost"):
        lanes.launch(work(7, Side.PREFILL, split))
    gate.close()
    lanes.close()
    fake.excuse_live()
    fake.take_misuse()


def test_events_that_cannot_all_be_made_are_given_back(fake: Fake) -> None:
    fake.fail("cuEventCreate", nth=17)
    with Green().open() as places:
        with pytest.raises(SmpartError, match="cuEventCreate"):
            StreamLanes(driver(), Green().device(), places, lambda side: OnStream(side, places))
        assert "event" not in "".join(fake.live())


def test_a_body_that_cannot_be_made(fake: Fake) -> None:
    before = threading.active_count()
    with Green().open() as places, pytest.raises(ValueError, match="no body today"):

        def bodies(side: Side) -> OnStream:
            if side is Side.DECODE:
                raise ValueError("no body today")
            return OnStream(side, places)

        StreamLanes(driver(), Green().device(), places, bodies)
    assert threading.active_count() == before


def test_realised_counts_come_from_the_driver(lanes: GreenLanes, fake: Fake) -> None:
    split = Split(64, 68)
    for side in Side:
        lanes.launch(work(len(side), side, split))
    collect(lanes, 2)
    fake.forget_calls()
    assert lanes.realised(Side.PREFILL) == frozenset(range(64))
    assert lanes.realised(Side.DECODE) == frozenset(range(64, 132))
    assert len(fake.calls("cuGreenCtxGetDevResource")) == 2


class Interrupted(OnStream):
    """A body in which something happens that is no `Exception`."""

    def enqueue(self, payload: Any, place: Any) -> Any:
        if payload[0] == "interrupt":
            raise KeyboardInterrupt
        if payload[0] == "exit":
            return sys.exit
        return super().enqueue(payload, place)


def test_an_interrupt_while_queueing_fills_no_lane(fake: Fake) -> None:
    with Green().open() as places:
        lanes = StreamLanes(driver(), Green().device(), places, lambda side: Interrupted(side, places))
        split = shared(lanes)
        for number in range(2 * lanes.depth):
            with pytest.raises(KeyboardInterrupt):
                lanes.launch(work(number, Side.PREFILL, split, ("interrupt", None)))
            (done,) = collect(lanes, 1)
            assert done.fault is not None and not done.fault.lost
        lanes.close()


def test_a_reader_that_exits_leaves_its_lane_watched(fake: Fake) -> None:
    with Green().open() as places:
        lanes = StreamLanes(driver(), Green().device(), places, lambda side: Interrupted(side, places))
        split = shared(lanes)
        lanes.launch(work(1, Side.DECODE, split, ("exit", None)))
        lanes.launch(work(2, Side.DECODE, split))
        bad, good = collect(lanes, 2)
        assert bad.fault is not None and "SystemExit" in bad.fault.message and good.result == ("decode", None)
        lanes.close()


def test_after_idleness_a_work_is_placed_where_it_was_seen(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device's clock drifts from the host's: a distance over a pause would set work before its own launch."""
    with Green().open() as places:
        lanes = StreamLanes(driver(), Green().device(), places, lambda side: OnStream(side, places))
        split = shared(lanes)
        lanes.launch(work(1, Side.DECODE, split))
        collect(lanes, 1)
        monkeypatch.setattr(lanes._lanes[Side.DECODE], "_seconds", lambda start, end: 1e-6)  # a clock that stood still
        launched = lanes.now()
        lanes.launch(work(2, Side.DECODE, split))
        (done,) = collect(lanes, 1)
        assert launched <= done.finished <= lanes.now()
        lanes.close()
