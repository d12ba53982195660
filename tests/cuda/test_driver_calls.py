"""Driver calls without a driver: how their answers are checked, and what is said where there is none."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from smpart.errors import BackendUnavailable
from smpart.partition.cuda import driver as module
from smpart.partition.cuda.driver import CudaError, Driver, driver, why_no_driver


class Code(int):
    """A `CUresult`."""

    name = "CUDA_ERROR_SOMETHING"


def api(version: int = 13000, **functions: Any) -> Any:
    texts = {"cuGetErrorString": lambda code: (0, b"something went wrong")}
    return SimpleNamespace(
        **{"cuInit": lambda flags: (0,), "cuDriverGetVersion": lambda: (0, version)} | texts | functions
    )


@pytest.mark.parametrize(("number", "version"), [(12040, (12, 4)), (13000, (13, 0)), (13010, (13, 1))])
def test_its_version(number: int, version: tuple[int, int]) -> None:
    it = Driver(api(number))
    assert it.version == version
    assert it.has(version) and it.has((12, 3)) and not it.has((version[0], version[1] + 1))


def test_results_come_without_their_code() -> None:
    it = Driver(api(none=lambda: (0,), one=lambda x: (0, x), two=lambda x, y: (0, x, y)))
    assert it("none") is None and it("one", 7) == 7 and it("two", 7, 8) == (7, 8)
    assert it.function("one") is it.function("one")  # looked up once


def test_cuda_is_initialised_first() -> None:
    called: list[int] = []
    Driver(api(cuInit=lambda flags: called.append(flags) or (0,)))
    assert called == [0]


@pytest.mark.parametrize(
    ("code", "sticky", "words"),
    [
        (1, False, "something went wrong"),
        (2, False, "the device's memory is full: free some, or give the KV memory less"),
        (700, True, "this process can use the device no more: restart it"),
    ],
)
def test_an_error_says_what_failed_and_what_to_do(code: int, sticky: bool, words: str) -> None:
    it = Driver(api(cuThing=lambda: (Code(code), 5)))
    with pytest.raises(CudaError) as caught:
        it("cuThing")
    assert (caught.value.call, caught.value.code, caught.value.sticky) == ("cuThing", code, sticky)
    assert str(caught.value) == f"cuThing failed with CUDA_ERROR_SOMETHING ({code}): {words}"


def test_an_error_that_nobody_knows() -> None:
    it = Driver(api(cuThing=lambda: (4711,), cuGetErrorString=lambda code: (1, None)))
    with pytest.raises(CudaError, match=r"^cuThing failed with an error \(4711\): $"):
        it("cuThing")


def test_a_function_that_is_not_there() -> None:
    def absent() -> None:
        raise RuntimeError('Function "cuNew" not found')

    def broken() -> None:
        raise RuntimeError("out of luck")

    it = Driver(api(cuNew=absent, cuBroken=broken))
    with pytest.raises(BackendUnavailable, match=r"^cuNew needs a newer NVIDIA driver than this one$"):
        it("cuNew")
    with pytest.raises(
        BackendUnavailable, match=r"^cuOld is unknown to this cuda-python: pip install -U 'smpart\[cuda\]'"
    ):
        it("cuOld")
    with pytest.raises(RuntimeError, match="out of luck"):
        it("cuBroken")


def test_a_context_is_current_within_and_not_after() -> None:
    stack: list[str] = []
    it = Driver(api(cuCtxPushCurrent=lambda c: stack.append(c) or (0,), cuCtxPopCurrent=lambda: (0, stack.pop())))
    with pytest.raises(ValueError, match="within"), it.current("one"):
        assert stack == ["one"]
        raise ValueError("within")
    assert stack == []


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets what ``cuda.bindings.driver`` is, or that there is none, and takes away what is known of this machine's."""

    def install(bindings: Any) -> None:
        package = ModuleType("cuda.bindings")
        package.driver = bindings  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "cuda.bindings", package if bindings is not None else None)
        monkeypatch.setattr(module, "driver", driver.__wrapped__)

    return install


class DynamicLibNotFoundError(RuntimeError):
    """As cuda-pathfinder names it."""


def raising(error: Exception) -> Any:
    def init(flags: int) -> None:
        raise error

    return init


@pytest.mark.parametrize(
    ("bindings", "words"),
    [
        (None, "cuda-python is missing: pip install 'smpart[cuda]'"),
        (
            api(cuInit=raising(DynamicLibNotFoundError("libcuda.so.1"))),
            "no NVIDIA driver is installed here (libcuda.so.1 was not found): install one of CUDA 12.4 or later; "
            "in a container, start it with the host's GPUs",
        ),
        (
            api(cuInit=lambda flags: (Code(803),)),
            "the NVIDIA driver does not work here: cuInit failed with CUDA_ERROR_SOMETHING (803): "
            "the driver and its user-space library differ in version: install matching ones or reboot",
        ),
        (
            api(cuDeviceGetCount=lambda: (0, 0)),
            "no NVIDIA device is visible: check CUDA_VISIBLE_DEVICES and the container's devices",
        ),
        (api(cuDeviceGetCount=lambda: (0, 1)), None),
    ],
)
def test_why_there_is_none(installed: Any, bindings: Any, words: str | None) -> None:
    installed(bindings)
    assert why_no_driver() == words


def test_other_mistakes_are_not_explained_away(installed: Any) -> None:
    installed(api(cuInit=raising(RuntimeError("out of luck"))))
    with pytest.raises(RuntimeError, match="out of luck"):
        why_no_driver()
