"""Contenders through a lane: which kernel is queued where, with what; and what it is said to have done."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from conformance import collect
from fake_cuda import Fake

from smpart.partition import Shape, Side, Split, Work
from smpart.partition.cuda.driver import driver
from smpart.partition.cuda.places import Place
from smpart.partition.cuda.streams import StreamLanes
from smpart.partition.green import Green, GreenPlaces
from smpart.runtime.contender import KINDS, Contender
from smpart.runtime.device.contenders import Contending


class Echo:
    """A body that answers with what it is given."""

    closed = 0

    def enqueue(self, payload: Any, place: Place) -> Callable[[], Any]:
        return lambda: ("echo", payload)

    def close(self) -> None:
        Echo.closed += 1


@pytest.fixture
def places(fake: Fake) -> Iterator[GreenPlaces]:
    with Green().open() as places:
        yield places


@pytest.fixture
def lanes(places: GreenPlaces) -> Iterator[StreamLanes]:
    api = driver()
    lanes = StreamLanes(api, places.gpu.device(api), places, lambda side: Contending(Echo(), api, places.primary))
    yield lanes
    lanes.close()


def run(lanes: StreamLanes, side: Side, split: Split, payload: object) -> Any:
    lanes.launch(Work(1, side, split, Shape(), 1.0, payload))
    (done,) = collect(lanes, 1)
    return done


def shared(lanes: StreamLanes) -> Split:
    return next(split for split in lanes.splits() if not split.exclusive)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("side", Side)
def test_each_runs_on_its_own_side_s_stream_and_sms(
    lanes: StreamLanes, places: GreenPlaces, fake: Fake, kind: str, side: Side
) -> None:
    split = shared(lanes)
    done = run(lanes, side, split, Contender(kind, 10))
    assert done.fault is None
    (launch,) = fake.launches()
    assert launch.kernel == ("arithmetic" if kind.startswith("arithmetic") else "memory")
    place = places.all()[side, split]
    assert launch.stream == int(place.stream)
    threads = 8 * split.units(side) * 256
    asked = done.result
    if launch.kernel == "arithmetic":
        assert asked.bytes == 0.0 and asked.flops == threads * 10 * 256 * 8 * 2
    else:
        assert asked.flops == 0.0 and asked.bytes == threads * 10 * 64 * 16


def test_other_payloads_go_by_untouched_and_nothing_is_loaded_for_them(lanes: StreamLanes, fake: Fake) -> None:
    fake.forget_calls()
    assert run(lanes, Side.DECODE, shared(lanes), "a step").result == ("echo", "a step")
    assert not fake.calls("cuLibraryLoadData") and not fake.calls("cuMemAlloc_v2")


@pytest.mark.parametrize("kind", ["nonsense", "dram:", "dram:0", "dram:101", "l2:x", ""])
def test_no_such_contender(lanes: StreamLanes, kind: str) -> None:
    done = run(lanes, Side.DECODE, shared(lanes), Contender(kind, 1))
    assert done.fault is not None and "no contender" in done.fault.message and not done.fault.lost


def test_what_it_took_is_given_back(lanes: StreamLanes, fake: Fake) -> None:
    before, closed = fake.live(), Echo.closed
    run(lanes, Side.PREFILL, shared(lanes), Contender("dram", 1))
    assert fake.live() != before
    lanes.close()
    assert Echo.closed == closed + 2
