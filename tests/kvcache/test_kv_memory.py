"""Layout and memory: one buffer, no copies, across processes too."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from smpart.errors import UnsupportedModel, UsageError
from smpart.kvcache import KVLayout
from smpart.kvcache.memory import KVMemory
from smpart.partition import ModelShape

LAYOUT = KVLayout(layers=3, kv_heads=2, head_dim=4, dtype="float32", block_tokens=8)


@pytest.fixture
def memfd() -> Iterator[int]:
    fd = os.memfd_create("kv")
    os.ftruncate(fd, LAYOUT.total_bytes(5))
    yield fd
    os.close(fd)


def test_block_bytes_agree_with_the_models_shape() -> None:
    shape = ModelShape(3, 8, 4, 2, 4, 10, 0, 0, 0, kv_bytes=4)
    assert LAYOUT.block_bytes == 8 * shape.kv_token_bytes
    assert LAYOUT.total_bytes(7) == 7 * LAYOUT.block_bytes
    assert LAYOUT.layer_shape(7) == (2, 7, 8, 2, 4)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_layers_tile_a_plain_allocation(dtype: str) -> None:
    layout = KVLayout(layers=3, kv_heads=2, head_dim=4, dtype=dtype, block_tokens=8)
    buffer = torch.zeros(layout.total_bytes(5) + 3, dtype=torch.uint8)
    memory = KVMemory.over(buffer, layout, 5)
    assert memory.data_ptr == buffer.data_ptr()
    assert memory.nbytes == layout.total_bytes(5)
    assert [tuple(layer.shape) for layer in memory.layers] == [layout.layer_shape(5)] * 3
    assert {str(layer.dtype) for layer in memory.layers} == {f"torch.{dtype}"}
    assert [memory.offset(layer) for layer in memory.layers] == [i * 5 * layout.block_bytes // 3 for i in range(3)]
    assert all(layer.untyped_storage().data_ptr() == buffer.data_ptr() for layer in memory.layers)
    for number, layer in enumerate(memory.layers, start=1):
        layer.fill_(number)
    assert all(layer.eq(number).all() for number, layer in enumerate(memory.layers, start=1))
    assert buffer[-3:].tolist() == [0, 0, 0]


def test_two_mappings_of_one_memfd_are_one_memory(memfd: int) -> None:
    size = LAYOUT.total_bytes(5)
    one = KVMemory.over(mmap.mmap(memfd, size), LAYOUT, 5)
    two = KVMemory.over(mmap.mmap(memfd, size), LAYOUT, 5)
    assert one.data_ptr != two.data_ptr
    one.layers[1][0, 4, 7] = 3.5
    assert two.layers[1][0, 4, 7].eq(3.5).all()
    assert one.offset(one.layers[1][0, 4]) == two.offset(two.layers[1][0, 4])


@pytest.mark.slow
def test_another_process_writes_what_this_one_reads(memfd: int) -> None:
    memory = KVMemory.over(mmap.mmap(memfd, LAYOUT.total_bytes(5)), LAYOUT, 5)
    program = (
        "import mmap, sys; from smpart.kvcache import KVLayout; from smpart.kvcache.memory import KVMemory\n"
        f"layout = {LAYOUT!r}\n"
        "KVMemory.over(mmap.mmap(int(sys.argv[1]), layout.total_bytes(5)), layout, 5).layers[2][1, 3] = 7.0\n"
    )
    subprocess.run([sys.executable, "-c", program, str(memfd)], pass_fds=[memfd], check=True)
    assert memory.layers[2][1, 3].eq(7.0).all() and memory.layers[2].sum() == 7.0 * 8 * 2 * 4


def test_a_bytearray_and_a_memoryview_will_do() -> None:
    raw = bytearray(LAYOUT.total_bytes(2))
    KVMemory.over(memoryview(raw), LAYOUT, 2).layers[0].fill_(1.0)
    assert KVMemory.over(raw, LAYOUT, 2).layers[0].eq(1.0).all()


def test_a_copy_is_told_from_a_view() -> None:
    memory = KVMemory.over(bytearray(LAYOUT.total_bytes(2)), LAYOUT, 2)
    assert memory.offset(memory.layers[0][1]) == LAYOUT.block_bytes // 3
    with pytest.raises(UsageError, match="it is a copy"):
        memory.offset(memory.layers[0].clone())


def test_unfit_buffers_are_refused(memfd: int) -> None:
    size = LAYOUT.total_bytes(5)
    with pytest.raises(UsageError, match=f"needs {LAYOUT.total_bytes(6)} bytes, the buffer has {size}"):
        KVMemory.over(mmap.mmap(memfd, size), LAYOUT, 6)
    with pytest.raises(UsageError, match="read-only"):
        KVMemory.over(mmap.mmap(memfd, size, prot=mmap.PROT_READ), LAYOUT, 5)
    with pytest.raises(UsageError, match="the buffer has 8"):
        KVMemory.over(torch.zeros(8, dtype=torch.uint8), LAYOUT, 5)
    with pytest.raises(UsageError, match="contiguous uint8"):
        KVMemory.over(torch.zeros(size), LAYOUT, 5)


@pytest.mark.parametrize("fields", [{"layers": 0}, {"kv_heads": 0}, {"head_dim": -4}, {"block_tokens": 0}])
def test_impossible_layouts_are_refused(fields: dict[str, int]) -> None:
    with pytest.raises(UsageError, match=next(iter(fields))):
        KVLayout(**{"layers": 1, "kv_heads": 1, "head_dim": 8, "dtype": "float32", **fields})  # type: ignore[arg-type]


def test_unknown_dtypes_and_unequal_heads_are_refused() -> None:
    with pytest.raises(UsageError, match="int3"):
        KVLayout(1, 1, 8, "int3")
    with pytest.raises(UnsupportedModel, match="equal sizes"):
        KVLayout(1, 1, 192, "float32", head_dim_v=128)
    assert KVLayout(1, 1, 8, "float32", head_dim_v=8).block_bytes == 2 * 16 * 8 * 4


def test_importing_the_room_imports_no_torch() -> None:
    program = "import sys, smpart.kvcache; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)
