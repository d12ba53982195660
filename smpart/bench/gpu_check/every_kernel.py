"""Launches every kernel of csrc once, on plain streams, and checks what can be checked: for compute-sanitizer."""

from __future__ import annotations

from typing import Any

import numpy as np

from smpart.partition import Side, Split
from smpart.partition.cuda.driver import Driver, driver
from smpart.partition.cuda.gpu import Gpu
from smpart.partition.cuda.places import Place
from smpart.partition.cuda.program import Argument, Program, int32, int64, pointer, uint64

_MS = 1_000_000
_FLOAT16, _INT8 = 1, 4


def main() -> None:
    """Launch them all. Raises what goes wrong."""
    api = driver()
    gpu = Gpu.find(api)
    primary = api("cuDevicePrimaryCtxRetain", gpu.handle)
    one, other = (_place(api, gpu, primary, side) for side in Side)
    with Program(api, gpu, primary) as program:
        for launch in (_probe, _meet, _contenders, _blocks):
            launch(program, one, other)
        program.wait(one, other)
    for place in (one, other):
        api("cuStreamDestroy", place.stream)
    api("cuDevicePrimaryCtxRelease", gpu.handle)
    print("launched probe, meet, arithmetic, memory, gather, scatter")


def _place(api: Driver, gpu: Gpu, primary: Any, side: Side) -> Place:
    split = Split(gpu.units, 0) if side is Side.PREFILL else Split(0, gpu.units)
    with api.current(primary):
        stream = api("cuStreamCreate", int(api.api.CUstream_flags.CU_STREAM_NON_BLOCKING))
    return Place(side, split, gpu.units, stream, primary)


def _probe(program: Program, one: Place, other: Place) -> None:
    memory = program.memory(20 * 64)
    arguments = (pointer(memory + 16 * 64), pointer(memory), uint64(_MS // 10))
    program.launch(program.kernel("smid_probe", "probe"), one, 64, 32, arguments)
    program.wait(one)


def _meet(program: Program, one: Place, other: Place) -> None:
    """Four blocks of each lane; the memory checker makes everything slow, so they wait for long."""
    kernel, memory = program.kernel("handshake", "meet", program.most_shared), program.memory(8 + 12 * 8)
    for index, place in enumerate((one, other)):
        numbers = (int32(index), int32(4), int32(4), uint64(2000 * _MS), uint64(_MS))
        arrays = pointer(memory + 72 + 16 * index), pointer(memory + 8 + 32 * index)
        program.launch(kernel, place, 4, 32, (pointer(memory), *numbers, *arrays), program.most_shared)
    program.wait(one, other)


def _contenders(program: Program, one: Place, other: Place) -> None:
    flag, sink, done, buffer = (program.memory(size) for size in (16, 16, 8 * 8, 16 * 4096))
    common: tuple[Argument, ...] = (pointer(flag), int64(2))
    arguments = (*common, int32(100), int32(100), pointer(done), pointer(sink))
    program.launch(program.kernel("contenders", "arithmetic"), one, 8, 128, arguments)
    for stores in (0, 1):
        streaming = (*common, pointer(buffer), int64(4096), int32(4), int32(stores), int32(100))
        program.launch(program.kernel("contenders", "memory"), one, 8, 128, (*streaming, pointer(done), pointer(sink)))
    program.wait(one)


def _blocks(program: Program, one: Place, other: Place) -> None:
    """Blocks of two layers to one buffer and back, as they are and as int8."""
    layers, blocks, shape = 2, 8, (2, 8, 16, 2, 64)
    rng = np.random.default_rng(0)
    pages = [rng.standard_normal(shape).astype(np.float16) for _ in range(layers)]
    ids = np.array([5, 1, 6], np.int32)
    addresses = [program.memory(page.nbytes) for page in pages]
    table, chosen = program.memory(8 * layers), program.memory(ids.nbytes)
    program.write(table, np.array(addresses, np.uint64))
    program.write(chosen, ids)
    for staged in (_FLOAT16, _INT8):
        stride = 2 * layers * 16 * 2 * (64 * 2 + 4) + 64
        staging = program.memory(stride * len(ids))
        sizes = [int32(n) for n in (len(ids), layers, blocks, 16, 2, 64, _FLOAT16, staged)]
        arguments = (pointer(staging), int64(stride), pointer(table), pointer(chosen), *sizes)
        for name, before in (("gather", pages), ("scatter", [np.zeros_like(page) for page in pages])):
            for address, page in zip(addresses, before, strict=True):
                program.write(address, page)
            program.launch(program.kernel("kv_blocks", name), one, 12, 128, arguments)
            program.wait(one)
        for address, page in zip(addresses, pages, strict=True):
            back = program.read(address, np.empty_like(page))
            wrong = np.abs(back[:, ids].astype(np.float32) - page[:, ids]).max()
            assert wrong <= (0.05 if staged == _INT8 else 0.0), f"blocks came back changed by {wrong}"


if __name__ == "__main__":
    main()
