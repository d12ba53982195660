"""Blocks moved and converted in one launch, against numpy indexing and torch's conversions."""

import ctypes
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from smpart import kernels

CODES = {"float32": 0, "float16": 1, "bfloat16": 2, "float8_e4m3fn": 3, "int8": 4, "float64": 5}
LARGEST = {"float8_e4m3fn": 448.0, "int8": 127.0}
SENTINEL = 0xA5


def kind(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


@dataclass
class Case:
    """Pages of some layers, and the blocks of them that are moved."""

    pages: list[torch.Tensor]  # a layer: [2, blocks, block_tokens, kv_heads, head_dim]
    ids: np.ndarray[Any, Any]
    staged: str

    @property
    def page(self) -> str:
        return str(self.pages[0].dtype).removeprefix("torch.")

    @property
    def quantised(self) -> bool:
        return self.staged != self.page and self.staged in LARGEST

    @property
    def values_shape(self) -> tuple[int, ...]:
        return (len(self.pages), 2, *self.pages[0].shape[2:])

    @property
    def scales_at(self) -> int:
        values = int(np.prod(self.values_shape)) * kind(self.staged).itemsize
        return -(-values // 16) * 16 if self.quantised else values

    @property
    def record(self) -> int:
        return self.scales_at + (int(np.prod(self.values_shape[:-1])) * 4 if self.quantised else 0)

    def staging(self, offset: int = 0) -> torch.Tensor:
        """uint8[count, stride], filled with a sentinel, `offset` bytes past a multiple of 16."""
        stride = -(-self.record // 16) * 16 + 16
        whole = torch.full((len(self.ids) * stride + 32,), SENTINEL, dtype=torch.uint8)
        start = -whole.data_ptr() % 16 + offset
        return whole[start : start + len(self.ids) * stride].view(len(self.ids), stride)

    @property
    def addresses(self) -> np.ndarray[Any, Any]:
        return np.array([page.data_ptr() for page in self.pages], np.uint64)

    @property
    def numbers(self) -> list[np.int32]:
        _, blocks, tokens, heads, dim = self.pages[0].shape
        numbers = [len(self.ids), len(self.pages), blocks, tokens, heads, dim, CODES[self.page], CODES[self.staged]]
        return [np.int32(number) for number in numbers]

    def run(self, gpu: Any, kernel: str, staging: torch.Tensor, threads: int = 64, grid: int = 3) -> None:
        args = [staging.numpy(), np.int64(staging.stride(0)), self.addresses, self.ids, *self.numbers]
        gpu.device(2)
        gpu.queue(kernel, grid, threads, args, range(2))
        gpu.run()

    def values(self, staging: torch.Tensor, index: int) -> torch.Tensor:
        size = int(np.prod(self.values_shape)) * kind(self.staged).itemsize
        return staging[index, :size].clone().view(kind(self.staged)).view(self.values_shape)

    def scales(self, staging: torch.Tensor, index: int) -> torch.Tensor:
        return staging[index, self.scales_at : self.record].clone().view(torch.float32).view(self.values_shape[:-1])

    def wanted(self, index: int) -> torch.Tensor:
        """What a record is made from: [layers, 2, block_tokens, kv_heads, head_dim]."""
        return torch.stack([page[:, int(self.ids[index])] for page in self.pages])


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


def quantise(values: torch.Tensor, staged: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of finite values, by torch."""
    largest = LARGEST[staged]
    scales = values.float().abs().amax(-1) / largest
    codes = torch.where(scales[..., None] > 0, values.float() / scales[..., None], torch.zeros(()))
    codes = codes.clamp(-largest, largest)
    return (codes.round() if staged == "int8" else codes).to(kind(staged)), scales


def make(
    seed: int, page: str, staged: str, layers: int, blocks: int, tokens: int, heads: int, dim: int, count: int
) -> Case:
    generator = torch.Generator().manual_seed(seed)
    shape = (2, blocks, tokens, heads, dim)
    pages = [(torch.randn(shape, generator=generator) * 3).to(kind(page)) for _ in range(layers)]
    ids = torch.randperm(blocks, generator=generator)[:count].to(torch.int32).numpy()
    return Case(pages, ids, staged)


sizes = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 1 << 30),
        "layers": st.integers(1, 3),
        "blocks": st.integers(1, 6),
        "tokens": st.integers(1, 5),
        "heads": st.integers(1, 3),
        "dim": st.sampled_from([1, 2, 3, 7, 8, 10, 16, 24, 64, 80, 128, 264, 272]),
        "count": st.integers(1, 6),
    }
)


@settings(max_examples=40)
@given(size=sizes, page=st.sampled_from(sorted(CODES)), offset=st.sampled_from([0, 4, 16]))
def test_copies_move_exactly_the_named_blocks(host_gpu: Any, size: Any, page: str, offset: int) -> None:
    case = make(page=page, staged=page, **size)
    staging = case.staging(offset)
    case.run(host_gpu, "gather", staging)
    for index in range(len(case.ids)):
        assert same_bits(case.values(staging, index), case.wanted(index))
        assert (staging[index, case.record :] == SENTINEL).all()
    original = [layer.clone() for layer in case.pages]
    for layer in case.pages:
        layer[:, case.ids] = 0
    case.run(host_gpu, "scatter", staging)
    assert all(same_bits(layer, before) for layer, before in zip(case.pages, original, strict=True))


pairs = st.tuples(
    st.sampled_from(["float32", "float16", "bfloat16"]),
    st.sampled_from(["float32", "float16", "bfloat16", "float8_e4m3fn", "int8"]),
).filter(lambda pair: pair[0] != pair[1])


@settings(max_examples=40)
@given(size=sizes, pair=pairs, offset=st.sampled_from([0, 4, 16]), threads=st.sampled_from([32, 96]))
def test_conversions_are_those_of_torch(
    host_gpu: Any, size: Any, pair: tuple[str, str], offset: int, threads: int
) -> None:
    case = make(page=pair[0], staged=pair[1], **size)
    staging = case.staging(offset)
    case.run(host_gpu, "gather", staging, threads)
    back = []
    for index in range(len(case.ids)):
        values = case.wanted(index)
        if case.quantised:
            codes, scales = quantise(values, case.staged)
            assert same_bits(case.scales(staging, index), scales)
            back.append((codes.float() * scales[..., None]).to(kind(case.page)))
        else:
            codes = values.to(kind(case.staged))
            back.append(codes.to(kind(case.page)))
        assert same_bits(case.values(staging, index), codes)
        assert (staging[index, case.record :] == SENTINEL).all()
    others = torch.ones(case.pages[0].shape[1], dtype=torch.bool)
    others[case.ids] = False
    untouched = [layer[:, others].clone() for layer in case.pages]
    case.run(host_gpu, "scatter", staging, threads)
    for index, expected in enumerate(back):
        assert same_bits(case.wanted(index), expected)
    for layer, before in zip(case.pages, untouched, strict=True):
        assert same_bits(layer[:, others], before)


@pytest.mark.parametrize("staged", ["float32", "float16", "int8"])
def test_ids_outside_the_pages_are_padding(host_gpu: Any, staged: str) -> None:
    case = make(1, "float32", staged, layers=2, blocks=4, tokens=2, heads=1, dim=8, count=4)
    case.ids[:] = [-1, 2, 4, 1]
    staging = case.staging()
    before = [layer.clone() for layer in case.pages]
    case.run(host_gpu, "gather", staging)
    assert (staging[[0, 2]] == SENTINEL).all()
    assert not (staging[[1, 3], : case.record] == SENTINEL).all()
    staging[:] = 0
    case.run(host_gpu, "scatter", staging)
    for layer, original in zip(case.pages, before, strict=True):
        assert (layer[:, [1, 2]] == 0).all()
        assert same_bits(layer[:, [0, 3]], original[:, [0, 3]])


@pytest.mark.parametrize("staged", ["float8_e4m3fn", "int8"])
def test_what_is_not_finite_stays_visible_and_zeros_stay_zero(host_gpu: Any, staged: str) -> None:
    case = make(2, "float32", staged, layers=1, blocks=1, tokens=5, heads=1, dim=16, count=1)
    row = case.pages[0][0, 0, :, 0]
    row[0, 3], row[1, 15], row[2, :] = float("nan"), float("-inf"), 0.0
    row[3, :] = 1e-45  # its scale underflows
    good = row[4].clone()
    staging = case.staging()
    case.run(host_gpu, "gather", staging)
    assert torch.isnan(case.scales(staging, 0)[0, 0, :2]).all()
    case.run(host_gpu, "scatter", staging)
    assert torch.isnan(row[:2]).all()
    assert (row[2:4] == 0).all()
    assert torch.allclose(row[4], good, atol=0.1, rtol=0.07)


def codes_and_halves(dtype: torch.dtype) -> torch.Tensor:
    """Every value of a 16-bit type, the float32 numbers around each midpoint of two, and random bit patterns."""
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype).float()
    finite = every[torch.isfinite(every)].sort().values
    middle = ((finite[1:].double() + finite[:-1].double()) / 2).float()
    near = [torch.nextafter(middle, torch.tensor(toward)) for toward in (-torch.inf, torch.inf)]
    random = torch.randint(-(1 << 31), (1 << 31) - 1, (100_000,), generator=torch.Generator().manual_seed(0))
    return torch.cat([every, middle, *near, random.to(torch.int32).view(torch.float32)])


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_sixteen_bit_floats_exhaustively(host_gpu: Any, name: str) -> None:
    numbers = codes_and_halves(kind(name))
    numbers = torch.cat([numbers, numbers.new_zeros(-len(numbers) % 16)])
    case = Case([numbers.view(2, 1, -1, 1, 8).contiguous()], np.zeros(1, np.int32), name)
    staging = case.staging()
    case.run(host_gpu, "gather", staging, threads=32, grid=2)
    codes, expected = case.values(staging, 0), case.wanted(0).to(kind(name))
    assert (torch.isnan(codes) == torch.isnan(expected)).all()
    assert same_bits(torch.nan_to_num(codes), torch.nan_to_num(expected))
    case.run(host_gpu, "scatter", staging, threads=32, grid=2)
    back, widened = case.wanted(0), expected.float()
    assert (torch.isnan(back) == torch.isnan(widened)).all()
    assert same_bits(torch.nan_to_num(back), torch.nan_to_num(widened))


def test_float8_exhaustively(host_gpu: Any) -> None:
    every = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    decoded = torch.empty(256)
    host_gpu.library.decode_float8(
        ctypes.c_void_p(every.data_ptr()), ctypes.c_void_p(decoded.data_ptr()), ctypes.c_longlong(256)
    )
    expected = every.view(torch.float8_e4m3fn).float()
    assert (torch.isnan(decoded) == torch.isnan(expected)).all()
    assert same_bits(torch.nan_to_num(decoded), torch.nan_to_num(expected))

    finite = expected[torch.isfinite(expected)].sort().values
    middle = (finite[1:] + finite[:-1]) / 2
    near = [torch.nextafter(middle, torch.tensor(toward)) for toward in (-torch.inf, torch.inf)]
    random = torch.randn(100_000, generator=torch.Generator().manual_seed(0)) * 200
    numbers = torch.cat([expected, middle, *near, random, torch.tensor([1e30, -1e30, torch.inf, 1e-30, -1e-45])])
    encoded = torch.empty(len(numbers), dtype=torch.uint8)
    host_gpu.library.encode_float8(
        ctypes.c_void_p(numbers.data_ptr()), ctypes.c_void_p(encoded.data_ptr()), ctypes.c_longlong(len(numbers))
    )
    wanted = numbers.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    nan = torch.isnan(numbers)
    assert (encoded[~nan] == wanted[~nan]).all()
    assert (encoded[nan] & 0x7F == 0x7F).all()


@pytest.mark.parametrize(("page", "staged"), [(5, 0), (0, 5), (3, 4), (9, 9), (-1, 0)])
def test_a_pair_of_types_that_does_not_exist_traps(shim_library: Path, page: int, staged: int) -> None:
    code = f"""
import ctypes
shim = ctypes.CDLL({str(shim_library)!r})
words = [ctypes.c_uint64(0) for _ in range(10)] + [ctypes.c_int({page}), ctypes.c_int({staged})]
shim.shim_device(1, ctypes.c_size_t(0), 64, ctypes.c_ulonglong(1), ctypes.c_ulonglong(0))
pointers = (ctypes.c_void_p * 12)(*(ctypes.addressof(word) for word in words))
shim.queue_gather(pointers, 1, 32, ctypes.c_size_t(0), 0, (ctypes.c_int * 1)(0), 1)
shim.shim_run()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode < 0
    assert "__trap" in done.stderr


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 10])
@pytest.mark.parametrize("staged", ["float32", "float16", "bfloat16", "float8_e4m3fn", "int8"])
@pytest.mark.parametrize("page", ["float32", "float16", "bfloat16"])
def test_on_a_gpu_the_same_bits_come_out(host_gpu: Any, page: str, staged: str, dim: int) -> None:
    here = make(3, page, staged, layers=3, blocks=9, tokens=16, heads=2, dim=dim, count=5)
    there = Case([layer.cuda() for layer in here.pages], here.ids, staged)
    staging = here.staging()
    device: Any = torch.cuda.get_device_properties(0)
    loaded = kernels.Kernels(f"sm_{device.major}{device.minor}")
    copy, addresses = staging.cuda(), torch.from_numpy(there.addresses.view(np.int64)).cuda()
    ids, stream = torch.from_numpy(there.ids).cuda(), torch.cuda.current_stream()
    for kernel in ("gather", "scatter"):
        here.run(host_gpu, kernel, staging, threads=256, grid=30)
        args = [copy, np.int64(copy.stride(0)), addresses, ids, *there.numbers]
        kernels.launch(loaded.function("kv_blocks", kernel), 30, 256, args, stream.cuda_stream)
        stream.synchronize()
        assert same_bits(copy.cpu(), staging)
    assert all(same_bits(far.cpu(), near) for far, near in zip(there.pages, here.pages, strict=True))
