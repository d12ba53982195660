"""What a switch of a lane costs the host, with a driver that does next to nothing."""

from __future__ import annotations

import itertools
import tracemalloc
from typing import Any

import pytest
from fake_cuda import Fake

from smpart.partition import Side
from smpart.partition.cuda.driver import driver
from smpart.partition.cuda.streams import StreamLanes
from smpart.partition.green import Green


class Nothing:
    def __init__(self, side: Side) -> None:
        self.side = side

    def enqueue(self, payload: Any, place: Any) -> Any:
        return lambda: None

    def close(self) -> None:
        pass


@pytest.fixture
def move(fake: Fake) -> Any:
    """Moves the decode lane to its next split: another stream, which waits for the last work on the old one."""
    with Green().open() as places:
        lanes = StreamLanes(driver(), Green().device(), places, Nothing)
        lane = lanes._lanes[Side.DECODE]
        turns = itertools.cycle(p for (s, split), p in places.all().items() if s is Side.DECODE and not split.exclusive)
        lane._last = lanes._events.next(next(turns))
        yield lambda: lane._move(next(turns))
        lanes.close()


def test_cost_of_a_switch(move: Any, benchmark: Any) -> None:
    benchmark(move)


def test_a_switch_allocates_nothing_that_stays(move: Any) -> None:
    for _ in range(100):
        move()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(1000):
            move()
        assert tracemalloc.get_traced_memory()[0] - before < 1000  # bytes, of all thousand
    finally:
        tracemalloc.stop()
