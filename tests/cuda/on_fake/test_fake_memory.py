"""The fake driver's memory: copies, IPC between processes, virtual memory; and the probe, which writes to it."""

import ctypes
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import fake_cuda
from cuda.bindings import driver as cu
from cuda_calls import PTX, Lanes, code, kernel, launch, ok
from fake_cuda import Fake

GRAIN = 2 << 20

OPEN = """
import ctypes
import sys
sys.path.insert(0, {fakes!r})
import fake_cuda
fake = fake_cuda.load({driver!r})
from cuda.bindings import driver as cu
from cuda_calls import code, ok
ok(cu.cuInit(0))
ok(cu.cuCtxSetCurrent(ok(cu.cuDevicePrimaryCtxRetain(0))))
{then}
assert fake.misuse() == [], fake.misuse()
"""


def in_another_process(fake: Fake, then: str, *inherited: int) -> str:
    """What a script that has the fake driver, and its primary context current, prints."""
    script = OPEN.format(fakes=str(Path(fake_cuda.__file__).parent), driver=fake.driver, then=then)
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, pass_fds=inherited)
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


def read(address: Any, count: int) -> bytes:
    buffer = ctypes.create_string_buffer(count)
    ok(cu.cuMemcpyDtoH(ctypes.addressof(buffer), address, count))
    return buffer.raw


def test_copies_and_fills(primary: Any, lanes: Lanes, fake: Fake) -> None:
    stream = lanes.streams[0]
    host = ok(cu.cuMemHostAlloc(64, 0))
    device, other = ok(cu.cuMemAlloc(64)), ok(cu.cuMemAlloc(64))
    ctypes.memmove(int(host), bytes(range(64)), 64)
    ok(cu.cuMemcpyHtoDAsync(device, int(host), 64, stream))
    ok(cu.cuMemcpyDtoDAsync(other, device, 64, stream))
    ok(cu.cuMemsetD8Async(device, 7, 32, stream))
    ok(cu.cuMemsetD32Async(int(device) + 32, 0x01020304, 8, stream))
    ok(cu.cuStreamSynchronize(stream))
    assert read(other, 64) == bytes(range(64))
    assert read(device, 64) == bytes([7] * 32) + bytes([4, 3, 2, 1] * 8)
    for address in (device, other):
        ok(cu.cuMemFree(address))
    ok(cu.cuMemFreeHost(int(host)))


def test_what_copies_refuse(primary: Any, lanes: Lanes, fake: Fake) -> None:
    device = ok(cu.cuMemAlloc(512))
    for address, count in ((int(device), 513), (0x1000, 1), (int(device) + 512, 1)):
        assert code(cu.cuMemsetD8Async(address, 0, count, lanes.streams[0])) == "INVALID_VALUE"
    assert all("no accessible device memory" in record for record in fake.take_misuse())
    ok(cu.cuMemFree(device))
    assert code(cu.cuMemFree(device)) == "INVALID_VALUE"
    assert len(fake.take_misuse()) == 1


def test_memory_is_counted(primary: Any, fake: Fake) -> None:
    free, total = ok(cu.cuMemGetInfo())
    assert free == total == 141_000_000_000
    large = ok(cu.cuMemAlloc(100_000_000_000))  # only what is touched takes room
    assert ok(cu.cuMemGetInfo())[0] == free - 100_000_000_000
    assert fake.live()["memory"] == 1
    assert code(cu.cuMemAlloc(50_000_000_000)) == "OUT_OF_MEMORY"
    ok(cu.cuMemFree(large))


def test_memory_in_use_is_not_freed(primary: Any, lanes: Lanes, fake: Fake) -> None:
    device = ok(cu.cuMemAlloc(512))
    with fake.paused():
        ok(cu.cuMemsetD8Async(device, 1, 512, lanes.streams[0]))
        ok(cu.cuMemFree(device))
    assert fake.take_misuse() == ["cuMemFree: memory 1 is in use by stream 1, which was not drained"]
    lanes.drain()


def test_a_lost_device_is_cleaned_up_without_draining(primary: Any, fake: Fake) -> None:
    lanes, device, module = Lanes(), ok(cu.cuMemAlloc(512)), ok(cu.cuModuleLoadData(PTX))
    ok(launch(kernel(module), lanes.streams[0]))
    ok(cu.cuMemsetD8Async(device, 1, 512, lanes.streams[0]))
    fake.fail_async(cu.CUresult.CUDA_ERROR_LAUNCH_FAILED)
    assert code(cu.cuStreamSynchronize(lanes.streams[0])) == "LAUNCH_FAILED"
    ends = [(cu.cuMemFree, device), (cu.cuModuleUnload, module)]
    ends += [(cu.cuEventDestroy, event) for event in lanes.events]
    ends += [(cu.cuStreamDestroy, stream) for stream in lanes.streams]
    ends += [(cu.cuGreenCtxDestroy, each) for each in lanes.greens]
    assert {code(end(handle)) for end, handle in ends} == {"LAUNCH_FAILED"}
    assert (fake.live(), fake.misuse()) == ({"primary context": 1}, [])


def test_ipc(primary: Any, fake: Fake) -> None:
    device = ok(cu.cuMemAlloc(4096))
    handle = ok(cu.cuIpcGetMemHandle(device))
    assert code(cu.cuIpcOpenMemHandle(handle, 1)) == "INVALID_CONTEXT"
    assert "cannot open it" in fake.take_misuse()[0]
    token = ctypes.string_at(handle.getPtr(), 64)
    printed = in_another_process(
        fake,
        f"""
handle = cu.CUipcMemHandle()
ctypes.memmove(handle.getPtr(), {token!r}, 64)
first, again = ok(cu.cuIpcOpenMemHandle(handle, 1)), ok(cu.cuIpcOpenMemHandle(handle, 1))
assert int(first) == int(again)
ok(cu.cuMemsetD8Async(first, 42, 4096, 0))
ok(cu.cuCtxSynchronize())
ok(cu.cuIpcCloseMemHandle(first))
print(fake.live())
ok(cu.cuIpcCloseMemHandle(first))
""",
    )
    assert "'IPC mapping': 1" in printed
    assert read(device, 4096) == bytes([42]) * 4096
    ok(cu.cuMemFree(device))
    late = f"""
handle = cu.CUipcMemHandle()
ctypes.memmove(handle.getPtr(), {token!r}, 64)
print(code(cu.cuIpcOpenMemHandle(handle, 1)))
"""
    assert in_another_process(fake, late) == "MAP_FAILED"


def shareable() -> Any:
    prop = cu.CUmemAllocationProp()
    prop.type = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    prop.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    prop.requestedHandleTypes = cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    return prop


def readable() -> Any:
    access = cu.CUmemAccessDesc()
    access.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    access.flags = cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    return access


def test_virtual_memory(primary: Any, lanes: Lanes, fake: Fake) -> None:
    prop = shareable()
    minimum = cu.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
    assert ok(cu.cuMemGetAllocationGranularity(prop, minimum)) == GRAIN
    assert code(cu.cuMemCreate(GRAIN + 1, prop, 0)) == "INVALID_VALUE"
    parts = [ok(cu.cuMemCreate(GRAIN, prop, 0)) for _ in range(2)]
    base = int(ok(cu.cuMemAddressReserve(2 * GRAIN, 0, 0, 0)))
    for at, part in enumerate(parts):
        ok(cu.cuMemMap(base + at * GRAIN, GRAIN, 0, part, 0))
    stream = lanes.streams[0]
    assert code(cu.cuMemsetD8Async(base, 1, 2 * GRAIN, stream)) == "INVALID_VALUE"  # no access yet
    assert "no accessible" in fake.take_misuse()[0]
    ok(cu.cuMemSetAccess(base, 2 * GRAIN, [readable()], 1))
    ok(cu.cuMemsetD8Async(base, 1, 2 * GRAIN, stream))  # across both
    ok(cu.cuStreamSynchronize(stream))
    assert code(cu.cuIpcGetMemHandle(base)) == "INVALID_VALUE"  # what expandable_segments runs into
    assert code(cu.cuMemAddressFree(base, 2 * GRAIN)) == "INVALID_VALUE"
    assert "still mapped" in fake.take_misuse()[0]
    for part in parts:
        ok(cu.cuMemRelease(part))
    assert ok(cu.cuMemGetInfo())[0] == 141_000_000_000 - 2 * GRAIN  # the mappings hold it
    for at in range(2):
        ok(cu.cuMemUnmap(base + at * GRAIN, GRAIN))
    assert ok(cu.cuMemGetInfo())[0] == 141_000_000_000
    ok(cu.cuMemAddressFree(base, 2 * GRAIN))


def test_an_allocation_goes_to_another_process_by_file_descriptor(primary: Any, fake: Fake) -> None:
    kind = cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    part = ok(cu.cuMemCreate(GRAIN, shareable(), 0))
    base = int(ok(cu.cuMemAddressReserve(GRAIN, 0, 0, 0)))
    ok(cu.cuMemMap(base, GRAIN, 0, part, 0))
    ok(cu.cuMemSetAccess(base, GRAIN, [readable()], 1))
    again = ok(cu.cuMemRetainAllocationHandle(base))
    assert int(again) == int(part)
    ok(cu.cuMemRelease(again))
    fd = int(ok(cu.cuMemExportToShareableHandle(part, kind, 0)))
    os.set_inheritable(fd, True)
    in_another_process(
        fake,
        f"""
part = ok(cu.cuMemImportFromShareableHandle({fd}, cu.CUmemAllocationHandleType({int(kind)})))
base = int(ok(cu.cuMemAddressReserve({GRAIN}, 0, 0, 0)))
ok(cu.cuMemMap(base, {GRAIN}, 0, part, 0))
access = cu.CUmemAccessDesc()
access.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
access.flags = cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
ok(cu.cuMemSetAccess(base, {GRAIN}, [access], 1))
ok(cu.cuMemsetD8Async(base, 9, {GRAIN}, 0))
ok(cu.cuCtxSynchronize())
""",
        fd,
    )
    os.close(fd)
    assert read(base, GRAIN) == bytes([9]) * GRAIN
    ok(cu.cuMemUnmap(base, GRAIN))
    ok(cu.cuMemAddressFree(base, GRAIN))
    ok(cu.cuMemRelease(part))


def test_the_probe_writes_which_sms_it_ran_on(primary: Any, lanes: Lanes) -> None:
    module = ok(cu.cuModuleLoadData(PTX))
    probe, blocks = kernel(module, b"probe"), 300
    seen = []
    for stream in lanes.streams:
        sm, span = ok(cu.cuMemAlloc(4 * blocks)), ok(cu.cuMemAlloc(16 * blocks))
        values, types = (int(sm), int(span), 1000), (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint64)
        ok(launch(probe, stream, blocks, (values, types)))
        ok(cu.cuStreamSynchronize(stream))
        seen.append(set(memoryview(read(sm, 4 * blocks)).cast("i")))
        ok(cu.cuMemFree(sm))
        ok(cu.cuMemFree(span))
    assert (len(seen[0]), len(seen[1]), len(seen[0] | seen[1])) == (48, 84, 132)
    ok(cu.cuModuleUnload(module))
