"""Toy bodies of lanes on CUDA streams, and lanes that own their places, for the conformance suite."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
from conformance import PATIENCE, ToyBody
from cuda.bindings import driver as cu

from smpart.partition import Side
from smpart.partition.cuda.driver import driver
from smpart.partition.cuda.places import Place
from smpart.partition.cuda.program import Program, int32, int64, pointer
from smpart.partition.cuda.streams import StreamLanes
from smpart.partition.green import Green, GreenPlaces

HostFunction = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
FOREVER = 1 << 21
"""Bursts of a kernel that is told to stop: ten seconds or so, should nobody tell it."""


class OnStream:
    """A toy body whose work is a host function on the lane's stream: it runs when kernels would, and in their order.

    A real driver may run host functions of all streams one after the other: see `OnDevice`.
    """

    def __init__(self, side: Side, places: GreenPlaces) -> None:
        self._toy = ToyBody(side)
        self._kept: list[Any] = []

    def enqueue(self, payload: Any, place: Place) -> Callable[[], Any]:
        if payload[0] == "refuse":
            raise ValueError("no such block")
        box: list[Any] = []

        def run() -> None:
            try:
                box.append(self._toy.run(payload))
            except Exception as error:
                box.append(error)

        self.call(run, place)
        return lambda: answer(box)

    def call(self, run: Callable[[], None], place: Place) -> None:
        """Queue a host function."""
        function = HostFunction(lambda _: run())
        address = ctypes.c_void_p(ctypes.cast(function, ctypes.c_void_p).value)
        self._kept += [function, address]
        driver()("cuLaunchHostFunc", place.stream, cu.CUhostFn(_ptr=ctypes.addressof(address)), 0)

    def close(self) -> None:
        self._kept.clear()


class OnDevice(OnStream):
    """The same with a kernel on all the place's SMs, which runs for as long as the payload is held at a gate.

    The host function before it only says that the stream has come there, so both lanes may stand at gates at once.
    """

    def __init__(self, side: Side, places: GreenPlaces) -> None:
        super().__init__(side, places)
        self._program = Program(driver(), places.gpu, places.primary)
        self._kernel = self._program.kernel("contenders", "arithmetic")
        self._done, self._sink = self._program.memory(8 * places.gpu.units), self._program.memory(4)
        with driver().current(places.primary):  # what the host writes there, a running kernel sees
            self._flags = driver()("cuMemHostAlloc", 4 * 64, 0)
        self._next = 0

    def enqueue(self, payload: Any, place: Place) -> Callable[[], Any]:
        if payload[0] == "refuse":
            raise ValueError("no such block")
        box: list[Any] = []
        flag = np.ctypeslib.as_array((ctypes.c_int32 * 1).from_address(self._flags + 4 * self._next))
        address = self._flags + 4 * self._next
        self._next = (self._next + 1) % 64
        flag[0] = 0
        gate = payload[0] == "gate"
        if gate:
            came = threading.Event()
            usher = threading.Thread(target=self._stand, args=(payload, came, flag, box), daemon=True)
            usher.start()
            self.call(came.set, place)
        else:
            try:
                box.append(self._toy.run(payload))
            except Exception as error:
                box.append(error)
        stop, done, sink = pointer(address), pointer(self._done), pointer(self._sink)
        arguments = (stop, int64(FOREVER if gate else 1), int32(1000), int32(100), done, sink)
        self._program.launch(self._kernel, place, place.units, 128, arguments)
        return lambda: answer(box)

    def close(self) -> None:
        super().close()
        driver()("cuMemFreeHost", self._flags)
        self._program.close()

    def _stand(self, payload: Any, came: threading.Event, flag: Any, box: list[Any]) -> None:
        """Go to the gate once the stream is there; let the kernel end when it is opened."""
        came.wait(PATIENCE)
        try:
            box.append(self._toy.run(payload))
        except Exception as error:
            box.append(error)
        flag[0] = 1


def answer(box: list[Any]) -> Any:
    """What a body found, or what it raised."""
    (result,) = box
    if isinstance(result, Exception):
        raise result
    return result


class GreenLanes(StreamLanes):
    """Lanes that own their places."""

    def __init__(self, body: Callable[[Side, GreenPlaces], OnStream] = OnStream) -> None:
        backend = Green()
        self.places = backend.open()
        try:
            super().__init__(driver(), backend.device(), self.places, lambda side: body(side, self.places))
        except BaseException:
            self.places.close()
            raise

    def close(self) -> None:
        super().close()
        self.places.close()
