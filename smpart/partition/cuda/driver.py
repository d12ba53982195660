"""The CUDA driver, called with every answer checked.

`cuda.bindings` is used rather than `cuda.core`: splitting a device's SMs by count with a remainder, which is the only
way with drivers before 13.1, needs the resources themselves.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from smpart.errors import BackendUnavailable, SmpartError
from smpart.partition.cuda.mps_errors import MPS_ERRORS

_MISSING_PACKAGE = "cuda-python is missing: pip install 'smpart[cuda]'"
_STICKY = frozenset({214, 220, 226, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 721, 806, 810, 999})
"""Results after which every later call of this process fails too: the context is lost (`cuda.h`, `CUresult`)."""

_ADVICE = {
    2: "the device's memory is full: free some, or give the KV memory less",
    46: "another process has the device to itself (compute mode): ask it to end, or change the compute mode",
    100: "no NVIDIA device is visible: check CUDA_VISIBLE_DEVICES and the container's devices",
    101: "there is no such device: check CUDA_VISIBLE_DEVICES",
    800: "the system does not permit it",
    801: "this device or driver does not support it",
    802: "the system is not ready (nvidia-fabricmanager not running?)",
    803: "the driver and its user-space library differ in version: install matching ones or reboot",
    804: "the forward-compatibility package does not fit this device: use the driver's own libcuda",
    **{code: advice for code, (_, advice) in MPS_ERRORS.items() if code != 915},
}


class CudaError(SmpartError):
    """A driver call failed.

    Attributes:
        call: the function's name.
        code: its `CUresult`.
        sticky: whether the process can use the device no more.
    """

    def __init__(self, call: str, code: int, name: str, text: str) -> None:
        self.call, self.code = call, code
        self.sticky = code in _STICKY
        lost = "this process can use the device no more: restart it" if self.sticky else text
        super().__init__(f"{call} failed with {name} ({code}): {_ADVICE.get(code, lost)}")


class Driver:
    """The driver of this machine. Use `driver()`; there is one a process.

    Attributes:
        api: the module `cuda.bindings.driver`.
        version: as the driver reports it, for example (13, 0).
    """

    def __init__(self, api: Any) -> None:
        self.api = api
        self._checked: dict[str, Callable[..., Any]] = {}
        self("cuInit", 0)
        major, rest = divmod(self("cuDriverGetVersion"), 1000)
        self.version: tuple[int, int] = (major, rest // 10)

    def __call__(self, name: str, *arguments: Any) -> Any:
        """Call a driver function; its results, without the `CUresult`: nothing, one value, or a tuple.

        Raises:
            CudaError: it failed.
            BackendUnavailable: this driver has no such function.
        """
        return self.function(name)(*arguments)

    def function(self, name: str) -> Callable[..., Any]:
        """A driver function that raises what `__call__` does."""
        if name not in self._checked:
            self._checked[name] = self._check(name)
        return self._checked[name]

    def has(self, since: tuple[int, int]) -> bool:
        """Whether the driver is of CUDA `since` or later."""
        return self.version >= since

    @contextmanager
    def current(self, context: Any) -> Iterator[None]:
        """Make a context current on this thread for the body of the ``with`` statement."""
        self("cuCtxPushCurrent", context)
        try:
            yield
        finally:
            self("cuCtxPopCurrent")

    def _check(self, name: str) -> Callable[..., Any]:
        raw = getattr(self.api, name, None)
        if raw is None:
            raise BackendUnavailable(f"{name} is unknown to this cuda-python: pip install -U 'smpart[cuda]'")

        def call(*arguments: Any) -> Any:
            try:
                result, *values = raw(*arguments)
            except RuntimeError as error:  # the function is not in this driver's library
                if "not found" not in str(error):
                    raise
                raise BackendUnavailable(f"{name} needs a newer NVIDIA driver than this one") from None
            if result:
                raise self._error(name, result)
            return values[0] if len(values) == 1 else tuple(values) if values else None

        return call

    def _error(self, call: str, result: Any) -> CudaError:
        failed, text = self.api.cuGetErrorString(result)
        return CudaError(call, int(result), getattr(result, "name", "an error"), "" if failed else text.decode())


def why_no_driver() -> str | None:
    """None if there is a driver with a device; otherwise what is missing and what would help."""
    try:
        if driver()("cuDeviceGetCount") == 0:
            return _ADVICE[100]
    except SmpartError as error:
        return str(error)
    return None


@functools.cache
def driver() -> Driver:
    """This process's driver.

    Raises:
        BackendUnavailable: no cuda-python, no driver, or no device it would work with.
    """
    try:
        from cuda.bindings import driver as api
    except ImportError:
        raise BackendUnavailable(_MISSING_PACKAGE) from None
    try:
        return Driver(api)
    except CudaError as error:
        raise BackendUnavailable(f"the NVIDIA driver does not work here: {error}") from None
    except RuntimeError as error:
        if type(error).__name__ != "DynamicLibNotFoundError":
            raise
        raise BackendUnavailable(
            "no NVIDIA driver is installed here (libcuda.so.1 was not found): install one of CUDA 12.4 or later; "
            "in a container, start it with the host's GPUs"
        ) from None
