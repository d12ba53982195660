"""What reaches cupy when a kernel is launched; on a GPU, the probe and the meeting themselves."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from smpart import kernels
from smpart.errors import BackendUnavailable, UsageError


class Tensor:
    """A tensor on the device, as far as the launch looks at one."""

    def __init__(self, device_type: int = 2) -> None:
        self.device_type = device_type

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device_type, 0

    def __dlpack__(self, **_: object) -> object:
        raise AssertionError("cupy asks for it, not we")


class Function:
    """A cupy kernel that writes down its calls, and the stream that was current."""

    def __init__(self, cupy: Any, name: str) -> None:
        self.cupy, self.name = cupy, name
        self.max_dynamic_shared_size_bytes = 48 * 1024
        self.calls: list[tuple[Any, ...]] = []

    def __call__(self, grid: Any, block: Any, args: Any, *, shared_mem: int = 0) -> None:
        self.calls.append((self.cupy.current[-1], grid, block, args, shared_mem))


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The part of cupy's interface that is used, without a device behind it."""
    current: list[int] = []

    @contextmanager
    def from_external(stream: Any) -> Iterator[None]:
        version, handle = stream.__cuda_stream__()
        assert version == 0
        current.append(handle)
        yield
        current.pop()

    fake = SimpleNamespace(
        current=current,
        cuda=SimpleNamespace(Stream=SimpleNamespace(from_external=from_external)),
        from_dlpack=lambda tensor: ("in place", tensor, current[-1]),
        modules=[],
    )

    def raw_module(*, path: str) -> Any:
        fake.modules.append(path)
        return SimpleNamespace(get_function=lambda name: Function(fake, name))

    fake.RawModule = raw_module
    monkeypatch.setitem(sys.modules, "cupy", fake)
    return fake


def test_launches_on_the_given_stream_with_tensors_in_place(cupy: Any) -> None:
    function, tensor, number = Function(cupy, "probe"), Tensor(), np.uint64(5)
    kernels.launch(function, 132, 32, [tensor, number], stream=0xABC, shared=1024)
    assert function.calls == [(0xABC, (132,), (32,), (("in place", tensor, 0xABC), number), 1024)]
    assert cupy.current == []


def test_raises_the_limit_of_shared_memory_only_where_it_must(cupy: Any) -> None:
    function = Function(cupy, "meet")
    for shared, limit in [(48 * 1024, 48 * 1024), (227 * 1024, 227 * 1024), (100 * 1024, 227 * 1024)]:
        kernels.launch(function, 1, 1, [], stream=1, shared=shared)
        assert function.max_dynamic_shared_size_bytes == limit


@pytest.mark.parametrize("plain", [3, 2.5, True])
def test_a_plain_number_is_refused(plain: float) -> None:
    with pytest.raises(UsageError, match="kernel argument 1 is the plain number"):
        kernels.launch(None, 1, 1, [np.float64(1), plain], stream=1)


@pytest.mark.parametrize("host", [torch.zeros(2), np.zeros(2), Tensor(device_type=3)])
def test_memory_of_the_host_is_refused(host: Any) -> None:
    with pytest.raises(UsageError, match="kernel argument 0 lies on the host"):
        kernels.launch(None, 1, 1, [host], stream=1)


def test_a_module_is_loaded_once(cupy: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "compiled", lambda source, arch: tmp_path / f"{source}-{arch}.cubin")
    loaded = kernels.Kernels("sm_90")
    assert [loaded.function("contenders", name).name for name in ("arithmetic", "memory")] == ["arithmetic", "memory"]
    assert cupy.modules == [str(tmp_path / "contenders-sm_90.cubin")]


def test_without_cupy_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(BackendUnavailable, match=r"need cupy, .*smpart\[cuda\]"):
        kernels.Kernels("sm_90").function("smid_probe", "probe")


@pytest.mark.gpu
def test_on_a_gpu_the_probe_and_the_meeting_find_every_sm() -> None:
    device: Any = torch.cuda.get_device_properties(0)
    loaded = kernels.Kernels(f"sm_{device.major}{device.minor}")
    sms, shared = device.multi_processor_count, device.shared_memory_per_block_optin
    stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        sm = torch.full((4 * sms,), -1, dtype=torch.int32, device="cuda")
        span = torch.zeros(8 * sms, dtype=torch.int64, device="cuda")
        args: list[object] = [sm, span, np.uint64(100_000)]
        kernels.launch(loaded.function("smid_probe", "probe"), 4 * sms, 1, args, stream.cuda_stream, shared)
        verdicts = []
        for wanted in (sms, sms + 1):
            word, gap = (torch.zeros(count, dtype=torch.int64, device="cuda") for count in (1, wanted))
            met = torch.zeros(wanted, dtype=torch.int32, device="cuda")
            numbers = [np.int32(0), np.int32(wanted), np.int32(0), np.uint64(50_000_000), np.uint64(1_000_000)]
            args = [word, *numbers, met, gap]
            kernels.launch(loaded.function("handshake", "meet"), wanted, 1, args, stream.cuda_stream, shared)
            verdicts.append(word)
    stream.synchronize()
    assert len(set(sm.tolist())) == sms
    assert [int(word) for word in verdicts] == [sms, 1 << 32 | sms]
