"""Events that mark where a piece of work begins and ends on its stream: made once, used in turn."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from smpart.partition.cuda.driver import CudaError, Driver
from smpart.partition.cuda.places import Place


@dataclass(frozen=True, slots=True, eq=False)
class Marks:
    """Two `CUevent` with timing, of the context of one stream. A thread that waits for `end` sleeps."""

    start: Any
    end: Any


class Events:
    """For each place a ring of marks, so that a switch of streams allocates nothing.

    Args:
        count: marks of one place in use at once.

    Raises:
        CudaError: they cannot be made; those that were are given back.
    """

    def __init__(self, driver: Driver, places: Iterable[Place], count: int) -> None:
        self._driver = driver
        self._made: list[Any] = []
        self._rings: dict[Place, list[Marks]] = {}
        self._turn: dict[Place, int] = {}
        try:
            for place in places:
                with driver.current(place.context):
                    self._rings[place] = [Marks(self._make(), self._make()) for _ in range(count)]
                self._turn[place] = 0
        except BaseException:
            self.close()
            raise

    def next(self, place: Place) -> Marks:
        """The marks of a place whose use is longest ago."""
        ring, turn = self._rings[place], self._turn[place]
        self._turn[place] = turn + 1 if turn + 1 < len(ring) else 0
        return ring[turn]

    def close(self) -> None:
        """Give them back. On a lost device there is nothing to give back to. Idempotent."""
        while self._made:
            with contextlib.suppress(CudaError):
                self._driver("cuEventDestroy", self._made.pop())

    def _make(self) -> Any:
        # Without timing disabled it can be measured; with blocking synchronisation its waiter leaves the CPU alone.
        event = self._driver("cuEventCreate", int(self._driver.api.CUevent_flags.CU_EVENT_BLOCKING_SYNC))
        self._made.append(event)
        return event
