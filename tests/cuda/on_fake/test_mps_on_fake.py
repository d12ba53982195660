"""MPS against the fake driver: a worker's context and read-back, and memory that two processes really share."""

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from fake_cuda import Fake

from smpart.errors import BackendUnavailable
from smpart.partition import Side, Split
from smpart.partition.cuda.driver import CudaError, Driver, driver
from smpart.partition.cuda.gpu import Gpu
from smpart.partition.cuda.ipc import Exported, export, open_exported
from smpart.partition.cuda.mps_client import affinity_context, look
from smpart.partition.cuda.mps_probe import read_back
from smpart.partition.cuda.mps_shares import Mode, Seen, check
from smpart.partition.mps import Mps

ALL = ("12.4", "12.8", "13.0", "13.1")
FAKES = Path(__file__).parents[2] / "fakes"
SPLIT = Split(96, 36)


@pytest.fixture
def api(fake: Fake) -> Driver:
    return driver()


@pytest.fixture
def primary(api: Driver) -> Iterator[Driver]:
    """The driver with the primary context current, as a holder has it."""
    context = api("cuDevicePrimaryCtxRetain", 0)
    with api.current(context):
        yield api
    api("cuDevicePrimaryCtxRelease", 0)


@pytest.mark.drivers(*ALL)
def test_the_backend_describes_the_device_of_the_driver(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", "/nowhere")
    caps, apart = Mps(program="true"), Mps(Mode.PARTITION, program="true")
    assert caps.why_unusable() is None
    device = caps.device()
    assert (device.units, device.facts["disjoint"], device.facts["compute_mode"]) == (132, False, "default")
    assert str(device.facts["uuid"]).startswith("GPU-")
    assert caps.splits() == Gpu.find(driver()).splits()
    why = apart.why_unusable()
    assert why is None if fake.driver == "13.1" else why is not None and "CUDA 13.1 or later" in why
    fake.reset(None)
    assert caps.why_unusable() is not None


@pytest.mark.drivers("12.8", "13.0", "13.1")
@pytest.mark.parametrize("asked", [2, 35, 36, 132])
def test_a_client_has_the_affinity_it_asked_for_rounded_up(fake: Fake, api: Driver, asked: int) -> None:
    fake.reset(mps=1)
    context = affinity_context(api, 0, asked)
    seen = look(api, 0)
    assert seen.mps is True and seen.affinity is not None and asked <= seen.affinity < asked + 2
    api("cuCtxDestroy", context)


@pytest.mark.drivers("12.4")
def test_older_drivers_make_no_such_context(fake: Fake, api: Driver) -> None:
    fake.reset(mps=1)
    with pytest.raises(BackendUnavailable, match="cuCtxCreate needs a newer NVIDIA driver"):
        affinity_context(api, 0, 36)
    why = Mps(Mode.AFFINITY, program="true").why_unusable()
    assert why is not None and "CUDA 12.5 or later; this one is of 12.4" in why


def test_a_share_by_affinity_passes_its_check(fake: Fake, api: Driver) -> None:
    fake.reset(mps=1)
    context = affinity_context(api, 0, SPLIT.decode)
    assert Mps(Mode.AFFINITY).check(look(api, 0), Side.DECODE, SPLIT) == SPLIT.decode
    api("cuCtxDestroy", context)


def test_outside_mps_there_is_no_affinity_and_no_share(primary: Driver) -> None:
    with pytest.raises(BackendUnavailable, match="need an MPS client"):
        affinity_context(primary, 0, 36)
    assert look(primary, 0) == Seen(False, 132, 132)
    for mode in Mode:
        with pytest.raises(BackendUnavailable, match="outside MPS"):
            Mps(mode).check(look(primary, 0), Side.DECODE, Split(96, 32) if mode is Mode.PARTITION else SPLIT)
    with pytest.raises(BackendUnavailable, match="ignored its share"):
        check(Seen(None, 132), Mps().pool([SPLIT]).shares[1])


@pytest.mark.parametrize("call", ["cuDeviceGetExecAffinitySupport", "cuCtxCreate"])
@pytest.mark.parametrize("code", [2, 805, 807, 808, 809])
def test_a_context_that_is_refused_leaves_none(fake: Fake, api: Driver, call: str, code: int) -> None:
    fake.reset(mps=1)
    fake.fail(call, code=code)
    with pytest.raises(CudaError, match=rf"{call} failed with CUDA_ERROR_\w+ \({code}\)"):
        affinity_context(api, 0, 36)
    context = affinity_context(api, 0, 36)  # the process can still be used
    api("cuCtxDestroy", context)


@pytest.mark.drivers("12.8", "13.0", "13.1")
def test_a_probe_in_a_process_of_its_own_sees_its_share_or_that_it_has_none(fake: Fake, tmp_path: Path) -> None:
    def environment(mps: int) -> dict[str, str]:
        load = f"import sys; sys.path.insert(0, {str(FAKES)!r}); import fake_cuda\n"
        folder = tmp_path / str(mps)
        folder.mkdir()
        (folder / "sitecustomize.py").write_text(f"{load}fake_cuda.load({fake.driver!r}).reset(mps={mps})\n")
        return os.environ | {"PYTHONPATH": str(folder)}

    inside, outside = environment(1), environment(0)
    assert read_back(inside, 35) == Seen(True, 132, 36)
    assert read_back(outside) == Seen(False, 132, 132)
    with pytest.raises(BackendUnavailable, match="got no context: contexts with execution affinity need an MPS client"):
        read_back(outside, 36)


@contextlib.contextmanager
def plain(api: Driver, size: int) -> Iterator[int]:
    pointer = api("cuMemAlloc", size)
    yield int(pointer)
    api("cuMemFree", pointer)


@contextlib.contextmanager
def virtual(api: Driver, size: int, shared: bool = True) -> Iterator[int]:
    """Memory as torch's expandable segments make it."""
    cuda = api.api
    properties = cuda.CUmemAllocationProp()
    properties.type = cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    properties.location.id = 0
    kinds = cuda.CUmemAllocationHandleType
    properties.requestedHandleTypes = (
        kinds.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR if shared else kinds.CU_MEM_HANDLE_TYPE_NONE
    )
    access = cuda.CUmemAccessDesc()
    access.location.type, access.location.id = properties.location.type, 0
    access.flags = cuda.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    allocation = api("cuMemCreate", size, properties, 0)
    base = api("cuMemAddressReserve", size, 0, 0, 0)
    api("cuMemMap", base, size, 0, allocation, 0)
    api("cuMemSetAccess", base, size, [access], 1)
    yield int(base)
    api("cuMemUnmap", base, size)
    api("cuMemAddressFree", base, size)
    api("cuMemRelease", allocation)


WORKER = """
import sys
sys.path.insert(0, {fakes!r})
import fake_cuda
fake = fake_cuda.load({version!r})
fake.reset()
from smpart.partition.cuda.driver import driver
from smpart.partition.cuda.ipc import Exported, open_exported
api = driver()
with api.current(api("cuDevicePrimaryCtxRetain", 0)):
    mapped = open_exported(api, {exported})
    seen = bytearray(4)
    api("cuMemcpyDtoH", seen, mapped.pointer, 4)
    api("cuMemcpyHtoD", mapped.pointer, bytes(reversed(seen)), 4)
    mapped.close()
api("cuDevicePrimaryCtxRelease", 0)
assert fake.misuse() == [] and fake.live() == {{}}, (fake.misuse(), fake.live())
"""


@pytest.mark.drivers(*ALL)
@pytest.mark.parametrize("made", [plain, virtual])
def test_a_worker_reads_and_writes_the_holders_memory_in_place(
    fake: Fake, primary: Driver, made: Callable[[Driver, int], AbstractContextManager[int]]
) -> None:
    with made(primary, 4 << 20) as base:
        pointer = base + 4096  # a tensor lies somewhere in its allocation
        primary("cuMemcpyHtoD", pointer, b"abcd", 4)
        exported = export(primary, pointer)
        assert (exported.token is None) == (made is virtual) and exported.offset == 4096
        text = WORKER.format(fakes=str(FAKES), version=fake.driver, exported=exported)
        done = subprocess.run(
            [sys.executable, "-c", text],
            pass_fds=[] if exported.fd is None else [exported.fd],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        exported.close()
        back = bytearray(4)
        primary("cuMemcpyDtoH", back, pointer, 4)
        assert bytes(back) == b"dcba"


def test_a_file_descriptor_goes_over_a_socket(primary: Driver) -> None:
    one, other = socket.socketpair()
    with virtual(primary, 2 << 20) as base, one, other:
        exported = export(primary, base)
        assert exported.fd is not None
        socket.send_fds(one, [b"kv"], [exported.fd])
        exported.close()
        _, (fd,), *_ = socket.recv_fds(other, 2, 1)
        received = Exported(exported.size, exported.offset, fd=fd)
        mapped = open_exported(primary, received)
        received.close()
        primary("cuMemcpyHtoD", base, b"same", 4)
        back = bytearray(4)
        primary("cuMemcpyDtoH", back, mapped.pointer, 4)
        assert bytes(back) == b"same"
        mapped.close()


def test_memory_that_was_not_made_to_be_shared_is_refused(primary: Driver) -> None:
    with (
        virtual(primary, 2 << 20, shared=False) as base,
        pytest.raises(BackendUnavailable, match="not made to be shared"),
    ):
        export(primary, base)


@pytest.mark.parametrize(
    "call",
    [
        "cuMemGetAddressRange",
        "cuIpcGetMemHandle",
        "cuMemRetainAllocationHandle",
        "cuMemExportToShareableHandle",
        "cuMemRelease",
    ],
)
def test_an_export_that_fails_leaves_nothing(fake: Fake, primary: Driver, call: str) -> None:
    with virtual(primary, 2 << 20) as base:
        fake.fail(call, code=999)
        with pytest.raises(CudaError, match=call):
            export(primary, base)
        if call == "cuMemRelease":
            fake.excuse_live()  # what could not be released is left, and said


@pytest.mark.parametrize(
    "call", ["cuMemImportFromShareableHandle", "cuMemAddressReserve", "cuMemMap", "cuMemSetAccess"]
)
def test_a_mapping_that_fails_leaves_nothing(fake: Fake, primary: Driver, call: str) -> None:
    with virtual(primary, 2 << 20) as base:
        exported = export(primary, base)
        fake.fail(call, code=2)
        with pytest.raises(CudaError, match=call):
            open_exported(primary, exported)
        open_exported(primary, exported).close()  # the second time it works
        exported.close()
