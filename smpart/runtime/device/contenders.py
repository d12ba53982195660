"""Contenders on a lane: kernels of ``csrc/contenders.cu`` in place of a forward, as `smpart.runtime.contender` asks.

They come through the lane as any work does, so also to a worker in another process, and run on its stream and SMs.
Nothing is loaded or allocated before the first one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from smpart.errors import UsageError
from smpart.partition.cuda.driver import Driver
from smpart.partition.cuda.gpu import Gpu
from smpart.partition.cuda.places import Place
from smpart.partition.cuda.program import Argument, Program, int32, int64, pointer
from smpart.partition.cuda.streams import StreamBody
from smpart.runtime.contender import Contender, Pressed

_BLOCKS, _THREADS = 8, 256
"""Blocks an SM, and threads a block: as many as an SM runs at once."""
_VECTORS, _VECTOR_BYTES = 64, 16
"""Of memory that each thread reads in a burst,"""
_STEPS, _STEP_FLOPS = 256, 16
"""and steps of arithmetic, each of eight multiply-adds. A burst takes some ten microseconds."""
_BEYOND_L2, _WITHIN_L2 = 4, 0.5
"""Size of what is read, in L2 caches."""


class Contending:
    """A body that also takes `Contender`s, beside what another body takes.

    Args:
        inner: the other body.
        primary: the device's primary context, or the one that the process has.
    """

    def __init__(self, inner: StreamBody, api: Driver, primary: Any) -> None:
        self._inner = inner
        self._api = api
        self._primary = primary
        self._kernels: _Kernels | None = None

    def enqueue(self, payload: Any, place: Place) -> Callable[[], Any]:
        """See `StreamBody`. The first contender also compiles, and waits for that.

        Raises:
            BackendUnavailable: the kernels cannot be compiled here.
            UsageError: no such contender.
        """
        if not isinstance(payload, Contender):
            return self._inner.enqueue(payload, place)
        if self._kernels is None:
            self._kernels = _Kernels(Program(self._api, Gpu.find(self._api), self._primary))
        pressed = self._kernels.launch(payload, place)
        return lambda: pressed

    def close(self) -> None:
        """Free both."""
        if self._kernels is not None:
            self._kernels.program.close()
        self._inner.close()


class _Kernels:
    """The kernels, and the memory that they read and write."""

    def __init__(self, program: Program) -> None:
        self.program = program
        attribute = program.api.api.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE
        self._l2 = int(program.api("cuDeviceGetAttribute", attribute, program.gpu.handle))
        self._stop, self._sink = program.memory(16), program.memory(16)
        self._done = program.memory(8 * _BLOCKS * program.gpu.units)
        self._buffer = program.memory(_BEYOND_L2 * self._l2)

    def launch(self, contender: Contender, place: Place) -> Pressed:
        """Queue one; what it will have done."""
        kind, duty = _read(contender.kind)
        grid = _BLOCKS * place.units
        threads = grid * _THREADS * contender.bursts
        begin: tuple[Argument, ...] = (pointer(self._stop), int64(contender.bursts))
        end = (int32(duty), pointer(self._done), pointer(self._sink))
        if kind.arithmetic:
            kernel = self.program.kernel("contenders", "arithmetic")
            self.program.launch(kernel, place, grid, _THREADS, (*begin, int32(_STEPS), *end))
            return Pressed(0.0, float(threads * _STEPS * _STEP_FLOPS))
        vectors = int(kind.l2_caches * self._l2) // _VECTOR_BYTES
        kernel = self.program.kernel("contenders", "memory")
        reads = (pointer(self._buffer), int64(vectors), int32(_VECTORS), int32(0))
        self.program.launch(kernel, place, grid, _THREADS, (*begin, *reads, *end))
        return Pressed(float(threads * _VECTORS * _VECTOR_BYTES), 0.0)


class _Kind(NamedTuple):
    """What is loaded: arithmetic, or memory of so many L2 caches."""

    arithmetic: bool
    l2_caches: float = 0.0


_KINDS = {"arithmetic": _Kind(True), "dram": _Kind(False, _BEYOND_L2), "l2": _Kind(False, _WITHIN_L2)}


def _read(kind: str) -> tuple[_Kind, int]:
    """``name`` or ``name:percent``."""
    name, colon, percent = kind.partition(":")
    if name not in _KINDS or (colon and not (percent.isdecimal() and 1 <= int(percent) <= 100)):
        raise UsageError(f"no contender {kind!r}: there are {', '.join(_KINDS)}, each with :1 to :100 percent")
    return _KINDS[name], int(percent) if colon else 100
