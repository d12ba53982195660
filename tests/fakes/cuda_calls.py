"""Short hands for tests that call the driver through ``cuda.bindings``: answers checked, and two lanes to work on."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from cuda.bindings import driver as cu

SM = cu.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
PTX = b".version 8.0\n.target sm_80\n.visible .entry work()\n.visible .entry probe()\n"
HostFunction = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def ok(answer: tuple[Any, ...]) -> Any:
    """The values of an answer that must be a success: None, one, or a tuple."""
    error, *values = answer
    assert error == cu.CUresult.CUDA_SUCCESS, error
    return values[0] if len(values) == 1 else tuple(values) or None


def code(answer: tuple[Any, ...]) -> str:
    """What an answer says, in short: "INVALID_VALUE"."""
    return str(answer[0].name).removeprefix("CUDA_").removeprefix("ERROR_")


def split(count: int, groups: int = 1, flags: int = 0) -> tuple[list[Any], Any]:
    """The device's SMs split by count: the groups and the remainder."""
    device = ok(cu.cuDeviceGetDevResource(0, SM))
    made, number, rest = ok(cu.cuDevSmResourceSplitByCount(groups, device, flags, count))
    return list(made[:number]), rest


def green(*resources: Any) -> Any:
    """A green context of resources."""
    return ok(cu.cuGreenCtxCreate(ok(cu.cuDevResourceGenerateDesc(list(resources), len(resources))), 0, 1))


@contextmanager
def current(context: Any) -> Iterator[None]:
    """The context is this thread's as long as this lasts."""
    ok(cu.cuCtxPushCurrent(context))
    try:
        yield
    finally:
        ok(cu.cuCtxPopCurrent())


def call_on(stream: Any, run: Callable[[], None]) -> Any:
    """Queue a host function; keep what is returned until it has run."""
    function = HostFunction(lambda _: run())
    address = ctypes.c_void_p(ctypes.cast(function, ctypes.c_void_p).value)
    ok(cu.cuLaunchHostFunc(stream, cu.CUhostFn(_ptr=ctypes.addressof(address)), 0))
    return function


def kernel(module: Any, name: bytes = b"work") -> Any:
    """A function of a module."""
    return ok(cu.cuModuleGetFunction(module, name))


def launch(function: Any, stream: Any, grid: int = 1, params: Any = 0) -> tuple[Any, ...]:
    """Launch blocks of 32 threads; the answer."""
    answer: tuple[Any, ...] = cu.cuLaunchKernel(function, grid, 1, 1, 32, 1, 1, 0, stream, params, 0)
    return answer


class Lanes:
    """Both sides of one split, each with a green context, its CUcontext, a stream and an event."""

    def __init__(self, count: int = 48) -> None:
        (group, *_), rest = split(count)
        self.greens = [green(group), green(rest)]
        self.contexts = [ok(cu.cuCtxFromGreenCtx(each)) for each in self.greens]
        self.streams = [ok(cu.cuGreenCtxStreamCreate(each, 1, 0)) for each in self.greens]
        self.events = []
        for context in self.contexts:
            with current(context):
                self.events.append(ok(cu.cuEventCreate(0)))

    def drain(self) -> None:
        for stream in self.streams:
            ok(cu.cuStreamSynchronize(stream))

    def close(self) -> None:
        for event in self.events:
            ok(cu.cuEventDestroy(event))
        for stream in self.streams:
            ok(cu.cuStreamDestroy(stream))
        for each in self.greens:
            ok(cu.cuGreenCtxDestroy(each))
