"""A worker's own part: its context, what it reads back, and memory mapped from another process."""

import ctypes
import json
import os
from types import SimpleNamespace

import pytest

from smpart.errors import BackendUnavailable
from smpart.partition.cuda import mps_probe
from smpart.partition.cuda.driver import CudaError, Driver
from smpart.partition.cuda.ipc import Exported, export, open_exported
from smpart.partition.cuda.mps_client import affinity_context, look
from smpart.partition.cuda.mps_probe import read_back
from smpart.partition.cuda.mps_shares import Seen

bindings = pytest.importorskip("cuda.bindings.driver")


class Api:
    """A driver that answers from a table, records every call, and fails where it is told to."""

    def __init__(self, answers, fail=None, code=999):
        self.api = bindings
        self.calls = []
        self._answers, self._fail, self._code = answers, fail, code

    def __call__(self, name, *arguments):
        self.calls.append((name, *arguments))
        if name == self._fail:
            raise CudaError(name, self._code, "SCRIPTED", "as scripted")
        answer = self._answers.get(name)
        return answer(*arguments) if callable(answer) else answer

    def names(self):
        return [call[0] for call in self.calls]


ATTRIBUTES = bindings.CUdevice_attribute


def attributes(mps=1, sms=36):
    values = {ATTRIBUTES.CU_DEVICE_ATTRIBUTE_MPS_ENABLED: mps, ATTRIBUTES.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: sms}
    return lambda attribute, device: values[attribute]


def affinity(sms):
    found = bindings.CUexecAffinityParam()
    found.param.smCount.val = sms
    return found


def test_a_context_with_affinity_asks_for_so_many_sms():
    api = Api({"cuDeviceGetExecAffinitySupport": 1, "cuCtxCreate": "a context"})
    assert affinity_context(api, 0, 36) == "a context"
    creation, flags, device = api.calls[-1][1:]
    (wanted,) = creation.execAffinityParams
    assert (wanted.type, wanted.param.smCount.val) == (bindings.CUexecAffinityType.CU_EXEC_AFFINITY_TYPE_SM_COUNT, 36)
    assert (creation.numExecAffinityParams, flags, device) == (1, 0, 0)


def test_a_context_with_affinity_needs_mps():
    api = Api({"cuDeviceGetExecAffinitySupport": 0})
    with pytest.raises(BackendUnavailable, match="need an MPS client"):
        affinity_context(api, 0, 36)
    assert api.names() == ["cuDeviceGetExecAffinitySupport"]


@pytest.mark.parametrize("call", ["cuDeviceGetExecAffinitySupport", "cuCtxCreate"])
def test_a_context_that_fails_says_which_call(call):
    with pytest.raises(CudaError, match=call):
        affinity_context(Api({"cuDeviceGetExecAffinitySupport": 1}, fail=call), 0, 36)


def test_a_worker_reads_back_what_it_has():
    answers = {"cuDeviceGetAttribute": attributes(), "cuCtxGetExecAffinity": affinity(36)}
    assert look(Api(answers), 0) == Seen(True, 36, 36)
    assert look(Api(answers, fail="cuCtxGetExecAffinity", code=224), 0) == Seen(True, 36, None)
    assert look(Api(answers | {"cuDeviceGetAttribute": attributes(mps=0, sms=132)}), 0).mps is False


def test_drivers_and_bindings_that_know_no_mps_attribute_leave_it_open():
    def unknown(attribute, device):
        if attribute == ATTRIBUTES.CU_DEVICE_ATTRIBUTE_MPS_ENABLED:
            raise CudaError("cuDeviceGetAttribute", 1, "CUDA_ERROR_INVALID_VALUE", "")
        return 36

    api = Api({"cuDeviceGetAttribute": unknown, "cuCtxGetExecAffinity": affinity(36)})
    assert look(api, 0) == Seen(None, 36, 36)
    api.api = SimpleNamespace(
        CUdevice_attribute=SimpleNamespace(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT="sms"),
        CUexecAffinityType=bindings.CUexecAffinityType,
    )
    assert look(api, 0).mps is None


@pytest.mark.parametrize("call", ["cuDeviceGetAttribute", "cuCtxGetExecAffinity"])
def test_other_failures_of_reading_back_are_not_hidden(call):
    answers = {"cuDeviceGetAttribute": attributes(), "cuCtxGetExecAffinity": affinity(36)}
    with pytest.raises(CudaError, match=call):
        look(Api(answers, fail=call), 0)


@pytest.mark.parametrize(
    ("does", "words"),
    [
        ('print(\'{"error": "no SMs left"}\')', "got no context: no SMs left"),
        ("raise SystemExit('cuInit crashed')", "ended with status 1: cuInit crashed"),
        ("pass", "ended with status 0: it said nothing"),
        ("__import__('time').sleep(60)", r"said nothing for 0\.5 s, and was ended"),
    ],
)
def test_a_probe_that_fails_says_why(tmp_path, does, words):
    """The module is another one here, so that it needs no driver."""
    package = tmp_path / "smpart" / "partition" / "cuda"
    package.mkdir(parents=True)
    for folder in (package.parent.parent, package.parent, package):
        (folder / "__init__.py").touch()
    (package / "mps_probe.py").write_text(does)
    with pytest.raises(BackendUnavailable, match=words):
        read_back({"PYTHONPATH": str(tmp_path)}, timeout_s=0.5 if "sleep" in does else 60)


def test_a_probe_without_a_driver_says_so(monkeypatch, capsys):
    def none():
        raise BackendUnavailable("no NVIDIA driver is installed here")

    monkeypatch.setattr(mps_probe, "driver", none)
    mps_probe.main([])
    assert json.loads(capsys.readouterr().out) == {"error": "no NVIDIA driver is installed here"}


@pytest.mark.parametrize(
    ("arguments", "ends"), [([], ["cuCtxPopCurrent", "cuDevicePrimaryCtxRelease"]), (["36"], ["cuCtxDestroy"])]
)
def test_a_probe_prints_what_it_sees_and_gives_its_context_back(monkeypatch, capsys, arguments, ends):
    class Pushing(Api):
        current = Driver.current

    api = Pushing(
        {
            "cuDeviceGetAttribute": attributes(),
            "cuCtxGetExecAffinity": affinity(36),
            "cuDeviceGetExecAffinitySupport": 1,
        }
    )
    monkeypatch.setattr(mps_probe, "driver", lambda: api)
    mps_probe.main(arguments)
    assert json.loads(capsys.readouterr().out) == {"mps": True, "sms": 36, "affinity": 36}
    assert api.names()[-len(ends) :] == ends


BASE, SIZE, POINTER = 0x7F0000000000, 4 << 20, 0x7F0000000100


def allocated(**more):
    handle = bindings.CUipcMemHandle()
    ctypes.memmove(handle.getPtr(), bytes(range(64)), 64)
    return {"cuMemGetAddressRange": (BASE, SIZE), "cuIpcGetMemHandle": handle} | more


def test_memory_goes_by_token_with_its_place_in_the_allocation():
    api = Api(allocated())
    exported = export(api, POINTER)
    assert exported == Exported(SIZE, 0x100, token=bytes(range(64)))
    assert api.calls == [("cuMemGetAddressRange", POINTER), ("cuIpcGetMemHandle", BASE)]
    exported.close()  # nothing to give back


@pytest.mark.parametrize("code", [1, 801])
def test_other_memory_goes_by_file_descriptor(code):
    reading, writing = os.pipe()
    os.close(writing)
    answers = allocated(cuMemRetainAllocationHandle="allocation", cuMemExportToShareableHandle=reading)
    api = Api(answers, fail="cuIpcGetMemHandle", code=code)
    exported = export(api, POINTER)
    assert exported == Exported(SIZE, 0x100, fd=reading)
    assert api.calls[-1] == ("cuMemRelease", "allocation")
    exported.close()
    with pytest.raises(OSError):
        os.fstat(reading)


def test_memory_that_was_not_made_to_be_shared_is_refused():
    class Both(Api):
        def __call__(self, name, *arguments):
            self._fail = name if name in ("cuIpcGetMemHandle", "cuMemExportToShareableHandle") else None
            return super().__call__(name, *arguments)

    api = Both(allocated(cuMemRetainAllocationHandle="allocation"), code=1)
    with pytest.raises(BackendUnavailable, match="without expandable_segments"):
        export(api, POINTER)
    assert api.calls[-1] == ("cuMemRelease", "allocation")
    api = Both(allocated(), code=700)
    with pytest.raises(CudaError, match="cuIpcGetMemHandle"):
        export(api, POINTER)


def test_an_export_that_fails_gives_the_allocation_back():
    class Late(Api):
        def __call__(self, name, *arguments):
            self._fail, self._code = {
                "cuIpcGetMemHandle": (name, 1),
                "cuMemExportToShareableHandle": (name, 999),
            }.get(name, (None, 0))
            return super().__call__(name, *arguments)

    api = Late(allocated(cuMemRetainAllocationHandle="allocation"))
    with pytest.raises(CudaError, match="cuMemExportToShareableHandle"):
        export(api, POINTER)
    assert api.calls[-1] == ("cuMemRelease", "allocation")


def test_a_token_is_opened_and_closed_again():
    api = Api({"cuIpcOpenMemHandle": BASE})
    mapped = open_exported(api, Exported(SIZE, 0x100, token=bytes(range(64))))
    assert mapped.pointer == POINTER
    handle, lazily = api.calls[0][1:]
    assert ctypes.string_at(handle.getPtr(), 64) == bytes(range(64)) and lazily == 1
    mapped.close()
    mapped.close()
    assert api.names() == ["cuIpcOpenMemHandle", "cuIpcCloseMemHandle"]
    assert api.calls[-1] == ("cuIpcCloseMemHandle", BASE)


OPENING = [
    "cuMemImportFromShareableHandle",
    "cuMemAddressReserve",
    "cuMemMap",
    "cuMemRelease",
    "cuMemSetAccess",
]


def test_a_file_descriptor_is_mapped_for_reading_and_writing():
    api = Api({"cuMemImportFromShareableHandle": "allocation", "cuMemAddressReserve": BASE})
    mapped = open_exported(api, Exported(SIZE, 0x100, fd=9), ordinal=2)
    assert mapped.pointer == POINTER and api.names() == OPENING
    (access,) = api.calls[-1][3]
    assert access.location.id == 2
    assert access.flags == bindings.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    mapped.close()
    assert api.calls[5:] == [("cuMemUnmap", BASE, SIZE), ("cuMemAddressFree", BASE, SIZE)]


@pytest.mark.parametrize(
    ("call", "undone"),
    [
        ("cuMemImportFromShareableHandle", []),
        ("cuMemAddressReserve", ["cuMemRelease"]),
        ("cuMemMap", ["cuMemRelease", "cuMemAddressFree"]),
        ("cuMemSetAccess", ["cuMemUnmap", "cuMemAddressFree"]),
    ],
)
def test_a_mapping_that_fails_half_way_leaves_nothing(call, undone):
    api = Api({"cuMemImportFromShareableHandle": "allocation", "cuMemAddressReserve": BASE}, fail=call)
    with pytest.raises(CudaError, match=call):
        open_exported(api, Exported(SIZE, 0, fd=9))
    assert api.names()[api.names().index(call) + 1 :] == undone


def test_a_token_that_does_not_open_says_so():
    with pytest.raises(CudaError, match="cuIpcOpenMemHandle"):
        open_exported(Api({}, fail="cuIpcOpenMemHandle"), Exported(SIZE, 0, token=bytes(64)))
