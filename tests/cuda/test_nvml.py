"""NVML facts, clocks, users and GPM against the fake library: what is told, and that what is not told harms nothing."""

import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from math import nan
from pathlib import Path
from types import ModuleType

import fake_nvml
import pytest
from fake_nvml import GPUS, FakeNvml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from smpart.bench import doctor, doctor_lines
from smpart.errors import BackendUnavailable, UsageError
from smpart.partition.cuda import nvml
from smpart.partition.cuda.gpm import Activity, Gpm

pytestmark = pytest.mark.skipif(fake_nvml.missing() is not None, reason=str(fake_nvml.missing()))

_NAMES = """name uuid driver_version cuda_version compute_capability memory_total_bytes memory_used_bytes
memory_free_bytes memory_bus_bits memory_peak_bytes_per_s mig compute_mode persistence sm_clock_mhz sm_clock_max_mhz
memory_clock_mhz memory_clock_max_mhz temperature_c power_draw_w power_limit_w throttled pcie_generation
pcie_generation_max pcie_width pcie_width_max ecc gpm"""
NAMES = set(_NAMES.split())
SESSION = {"nvmlInitWithFlags", "nvmlShutdown", "nvmlDeviceGetHandleByIndex_v2", "nvmlDeviceGetHandleByUUID"}
REASONS = {
    fake_nvml.NOT_SUPPORTED: "this GPU does not support it",
    fake_nvml.NO_PERMISSION: "not permitted here",
    fake_nvml.FUNCTION_NOT_FOUND: "this driver's NVML lacks it",
    fake_nvml.GPU_IS_LOST: "the GPU is lost: it fell off the bus or is otherwise inaccessible",
    fake_nvml.UNKNOWN: "NVML says Unknown Error (999)",
    777: "NVML says fake error 777 (777)",
}


@pytest.fixture(scope="module")
def library() -> FakeNvml:
    return fake_nvml.load()


@pytest.fixture
def fake(library: FakeNvml) -> Iterator[FakeNvml]:
    """A machine with one H200; afterwards no rule is broken and nothing is left open."""
    library.reset("h200")
    with library.served():
        yield library
    assert library.misuse() == []
    assert library.live() == {"sessions": 0, "samples": 0}


def read_calls(fake: FakeNvml, read: Callable[[], object]) -> list[str]:
    """The calls that a reader makes, without those that open a session and find the GPU."""
    fake.reset("h200")
    read()
    return sorted(set(fake.calls()) - SESSION)


# Facts


@pytest.mark.parametrize("kind", GPUS)
def test_every_fact_is_what_the_gpu_says(fake: FakeNvml, kind: str) -> None:
    gpu = GPUS[kind]
    fake.reset("a100", gpu, driver="550.54.14", cuda="12.4")
    facts = nvml.device_facts(1)
    unavailable = facts.pop("unavailable")
    assert facts.keys() | unavailable.keys() == NAMES and not facts.keys() & unavailable.keys()
    assert unavailable == ({"mig": REASONS[3]} if gpu.mig == fake_nvml.UNSUPPORTED else {})
    mib = 2**20
    expected = {
        "name": gpu.name,
        "uuid": fake_nvml.uuid(1),
        "driver_version": "550.54.14",
        "cuda_version": "12.4",
        "compute_capability": f"{gpu.major}.{gpu.minor}",
        "memory_total_bytes": gpu.memory_mib * mib,
        "memory_used_bytes": gpu.used_mib * mib,
        "memory_free_bytes": (gpu.memory_mib - gpu.used_mib) * mib,
        "memory_bus_bits": gpu.bus_bits,
        "mig": False,
        "compute_mode": "default",
        "persistence": True,
        "sm_clock_mhz": gpu.sm_mhz,
        "sm_clock_max_mhz": gpu.sm_max_mhz,
        "memory_clock_max_mhz": gpu.memory_max_mhz,
        "temperature_c": gpu.temperature_c,
        "power_draw_w": 75.5,
        "power_limit_w": gpu.power_limit_mw / 1000,
        "throttled": [],
        "pcie_generation": 1,
        "pcie_generation_max": gpu.pcie_generation_max,
        "pcie_width": 16,
        "ecc": bool(gpu.ecc),
        "gpm": bool(gpu.gpm),
    }
    assert {name: facts.get(name) for name in expected if name not in unavailable} == {
        name: value for name, value in expected.items() if name not in unavailable
    }
    json.dumps(facts)


def test_the_peak_bandwidth_is_that_of_the_data_sheets(fake: FakeNvml) -> None:
    published = {"a100": 2.039e12, "h100": 3.35e12, "rtx4090": 1.008e12}  # NVIDIA's data sheets, bytes/s
    fake.reset(*published)
    for index, peak in enumerate(published.values()):
        assert nvml.device_facts(index)["memory_peak_bytes_per_s"] == pytest.approx(peak, rel=0.005)


def test_a_gpu_is_found_by_index_and_uuid_with_or_without_prefix(fake: FakeNvml) -> None:
    fake.reset("h100", "h200", replace(GPUS["b200"], uuid="MIG-5d7e"))
    uuid = fake_nvml.uuid(1)
    for device in (1, uuid, uuid.removeprefix("GPU-")):
        assert nvml.device_facts(device)["name"] == "NVIDIA H200"
    assert nvml.device_facts("MIG-5d7e")["name"] == "NVIDIA B200"
    assert nvml.gpu_count() == 3


@pytest.mark.parametrize("device", [1, -1, "GPU-nowhere", ""])
def test_an_unknown_gpu(fake: FakeNvml, device: str | int) -> None:
    assert nvml.device_facts(device) == {"unavailable": {"device": f"GPU {device}: NVML knows no such GPU"}}
    for read in (nvml.clocks, nvml.processes, lambda d: Gpm(d).__enter__()):
        with pytest.raises(BackendUnavailable, match="NVML knows no such GPU"):
            read(device)


@pytest.mark.parametrize("code", REASONS)
def test_what_cannot_be_read_is_absent_with_its_reason(fake: FakeNvml, code: int) -> None:
    for function in read_calls(fake, lambda: nvml.device_facts(0)):
        fake.reset("h200")
        whole = nvml.device_facts(0)
        fake.fail(function, code, forever=True)
        facts = nvml.device_facts(0)
        unavailable = facts.pop("unavailable")
        assert unavailable and set(unavailable.values()) == {REASONS[code]}, function
        assert facts == {name: whole[name] for name in NAMES - unavailable.keys()}, function


def test_a_driver_without_the_newer_functions() -> None:
    lacking = ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlGpmQueryDeviceSupport", "nvmlGpmSampleAlloc")
    fake = fake_nvml.load(lacking)
    fake.reset("h200", driver="525.60.13", cuda="12.0")
    with fake.served():
        facts = nvml.device_facts(0)
        assert facts["unavailable"] == dict.fromkeys(("throttled", "gpm"), REASONS[13])
        assert nvml.clocks(0).throttled is None and nvml.clocks(0).sm_mhz == 345
        with pytest.raises(BackendUnavailable, match="lacks it"):
            Gpm(0).__enter__()
    assert not fake.misuse() and not any(fake.live().values())


# NVML that is not there


def absent(help_with: str) -> None:
    """NVML says why it is missing, everywhere, in one line with this help, and nothing else breaks."""
    why = nvml.nvml_missing()
    assert why is not None and help_with in why and "\n" not in why
    assert nvml.device_facts(0) == {"unavailable": {"nvml": why}}
    for read in (nvml.gpu_count, lambda: nvml.clocks(0), lambda: nvml.processes(0), lambda: Gpm(0).__enter__()):
        with pytest.raises(BackendUnavailable) as raised:
            read()
        assert str(raised.value) == why
    facts = doctor.examine()
    assert facts["nvml"] == {"missing": why, "gpus": []}
    assert f"nvml      {why}" in doctor_lines.lines(facts)


def test_no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    absent("pip install 'nvidia-ml-py")


def test_a_package_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", ModuleType("pynvml"))
    absent("pip install 'nvidia-ml-py")


def test_no_library() -> None:
    with fake_nvml.fresh_pynvml() as pynvml:

        def find(name: str) -> ctypes.CDLL:
            raise OSError(f"{name}: cannot open shared object file")

        pynvml.CDLL = find
        absent("NVIDIA_DRIVER_CAPABILITIES")


@pytest.mark.parametrize(
    ("code", "help_with"),
    [
        (fake_nvml.DRIVER_NOT_LOADED, "kernel module"),
        (fake_nvml.NO_PERMISSION, "/dev/nvidiactl"),
        (fake_nvml.LIB_RM_VERSION_MISMATCH, "reboot"),
        (fake_nvml.UNKNOWN, "Unknown Error"),
    ],
)
def test_a_driver_that_does_not_answer(fake: FakeNvml, code: int, help_with: str) -> None:
    fake.fail("nvmlInitWithFlags", code, forever=True)
    absent(help_with)


def test_a_session_that_does_not_end_is_no_error(fake: FakeNvml) -> None:
    fake.fail("nvmlShutdown", fake_nvml.UNKNOWN)
    assert nvml.nvml_missing() is None
    assert fake.live()["sessions"] == 1
    fake.reset()


def test_an_outer_session_keeps_inner_calls_cheap_and_open(fake: FakeNvml) -> None:
    with nvml.session():
        nvml.clocks(0)
        assert fake.live()["sessions"] == 1
    assert fake.live()["sessions"] == 0


# Clocks and users


def test_clocks(fake: FakeNvml) -> None:
    fake.reset(replace(GPUS["h200"], sm_mhz=1830, memory_mhz=3201, temperature_c=67, event_reasons=0x24))
    assert nvml.clocks(0) == nvml.Clocks(1830, 3201, 67, ("power cap", "software thermal slowdown"))


@pytest.mark.parametrize(
    ("bits", "words"),
    [
        (0x000, ()),
        (0x001, ()),  # idle holds nothing down
        (0x002, ("application clocks",)),
        (0x008 | 0x040, ("hardware slowdown", "hardware thermal slowdown")),
        (0x010 | 0x080 | 0x001, ("sync boost", "power brake")),
        (0x100 | 0x200 | 0x400, ("display clocks", "board limit", "reliability")),
        (1 << 63 | 0x800, ("reason 0x800", "reason 0x8000000000000000")),
    ],
)
def test_throttling_in_words(fake: FakeNvml, bits: int, words: tuple[str, ...]) -> None:
    fake.reset(replace(GPUS["h200"], event_reasons=bits))
    assert nvml.clocks(0).throttled == words
    assert nvml.device_facts(0)["throttled"] == list(words)


@pytest.mark.parametrize("code", REASONS)
def test_clocks_that_cannot_be_read_are_none(fake: FakeNvml, code: int) -> None:
    for function in read_calls(fake, lambda: nvml.clocks(0)):
        fake.reset("h200")
        whole = nvml.clocks(0)
        fake.fail(function, code, forever=True)
        partial = nvml.clocks(0)
        pairs = [(getattr(partial, name), getattr(whole, name)) for name in nvml.Clocks.__slots__]
        assert any(now is None for now, _ in pairs) and all(now in (None, before) for now, before in pairs), function


def test_users_of_all_kinds_are_listed_once(fake: FakeNvml) -> None:
    fake.process(4000, -1)
    fake.process(300, 5 << 30)
    fake.process(300, 6 << 30, "mps")
    fake.process(4000, 1 << 20, "mps")
    fake.process(7, -1, "graphics")
    assert nvml.processes(0) == (
        nvml.GpuProcess(7, None),
        nvml.GpuProcess(300, 6 << 30),
        nvml.GpuProcess(4000, 1 << 20),
    )


def test_users_without_the_lesser_lists(fake: FakeNvml) -> None:
    fake.process(300, 5 << 30)
    for kind in ("MPSCompute", "Graphics"):
        fake.fail(f"nvmlDeviceGet{kind}RunningProcesses_v3", fake_nvml.NOT_SUPPORTED, forever=True)
    assert nvml.processes(0) == (nvml.GpuProcess(300, 5 << 30),)


@pytest.mark.parametrize("code", REASONS)
def test_users_that_may_not_be_told(fake: FakeNvml, code: int) -> None:
    fake.fail("nvmlDeviceGetComputeRunningProcesses_v3", code)
    with pytest.raises(BackendUnavailable) as raised:
        nvml.processes(0)
    assert str(raised.value) == f"GPU 0: who uses it is unknown: {REASONS[code]}"


# GPM

PERCENT = st.floats(0, 100)
SPANS = st.lists(
    st.lists(st.tuples(st.floats(0.06, 5), PERCENT, PERCENT, PERCENT, PERCENT), min_size=2, max_size=4),
    min_size=1,
    max_size=4,
)


@pytest.mark.parametrize("kind", ["h100", "h200", "b200"])
@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(spans=SPANS)
def test_gpm_tells_the_mean_of_each_span(fake: FakeNvml, kind: str, spans: list[list[tuple[float, ...]]]) -> None:
    fake.reset("a100", kind)
    peak = 2e6 * GPUS[kind].memory_max_mhz * GPUS[kind].bus_bits / 8
    with Gpm(fake_nvml.uuid(1), clock=fake.clock) as gpm:
        for span in spans:
            for seconds, sm, occupancy, tensor, dram in span:
                fake.run(seconds, 1, sm_active=sm, sm_occupancy=occupancy, tensor_active=tensor, dram_bandwidth=dram)
            busy = gpm.read()
            total = sum(part[0] for part in span)
            means = [sum(part[0] * part[i] for part in span) / total / 100 for i in range(1, 5)]
            told = [busy.seconds, busy.sm_active, busy.sm_occupancy, busy.tensor_active, busy.dram_bandwidth]
            assert told == pytest.approx([total, *means], abs=1e-9)
            assert busy.dram_bytes_per_s == pytest.approx(means[3] * peak, abs=1e4)
            assert busy.unavailable == {}


def test_a_mark_begins_the_span_anew(fake: FakeNvml) -> None:
    with Gpm(0, clock=fake.clock) as gpm:
        fake.run(3, sm_active=100)
        gpm.mark()
        fake.run(1, sm_active=20)
        assert gpm.read() == Activity(1, 0.2, 0, 0, 0, 0, {})


def test_a_span_too_short_is_refused_and_goes_on(fake: FakeNvml) -> None:
    with Gpm(0, clock=fake.clock) as gpm:
        fake.run(0.1, sm_active=100)
        with pytest.raises(UsageError, match="after 100 ms: the GPU counts every 100 ms"):
            gpm.read()
        fake.run(0.1, sm_active=50)
        assert gpm.read().sm_active == pytest.approx(0.75)


def test_gpm_outside_its_block(fake: FakeNvml) -> None:
    gpm = Gpm(0, clock=fake.clock)
    for call in (gpm.read, gpm.mark):
        with pytest.raises(UsageError, match="use it inside"):
            call()
    with gpm:
        with pytest.raises(UsageError, match="in use"):
            gpm.__enter__()
        assert fake.live() == {"sessions": 1, "samples": 2}
    with pytest.raises(UsageError, match="use it inside"):
        gpm.read()
    with gpm:  # it may be used again
        fake.run(1, sm_active=100)
        assert gpm.read().sm_active == 1


@pytest.mark.parametrize("kind", ["a100", "rtx4090"])
def test_generations_without_gpm(fake: FakeNvml, kind: str) -> None:
    fake.reset(kind)
    with pytest.raises(BackendUnavailable, match="GPU 0: GPM is unavailable: it needs Hopper"):
        Gpm(0).__enter__()


def measure(fake: FakeNvml) -> Activity:
    with Gpm(0, clock=fake.clock) as gpm:
        fake.run(0.5, sm_active=80, dram_bandwidth=40)
        return gpm.read()


@pytest.mark.parametrize("code", REASONS)
def test_a_fault_at_any_call_of_gpm_leaks_nothing(fake: FakeNvml, code: int) -> None:
    fake.reset("h200")
    measure(fake)
    made = fake.calls()
    tolerated = {"nvmlDeviceGetMemoryBusWidth", "nvmlDeviceGetMaxClockInfo"}
    for function in sorted(set(made) - SESSION - tolerated):
        for nth in range(1, made.count(function) + 1):
            fake.reset("h200")
            fake.fail(function, code, nth=nth)
            with pytest.raises(BackendUnavailable) as raised:
                measure(fake)
            assert REASONS[code] in str(raised.value) and "GPM" in str(raised.value)
            lost = int(function == "nvmlGpmSampleFree")  # the one that could not be freed
            assert fake.live() == {"sessions": 0, "samples": lost}
            assert fake.misuse() == ["nvmlShutdown: 1 samples not freed"] * lost
    for function in tolerated:
        fake.reset("h200")
        fake.fail(function, code)
        assert measure(fake) == Activity(0.5, 0.8, 0, 0, 0.4, None, {})
    fake.reset("h200")


def test_an_error_in_the_block_is_the_one_that_is_seen(fake: FakeNvml) -> None:
    with pytest.raises(ZeroDivisionError), Gpm(0, clock=fake.clock):
        raise ZeroDivisionError


def test_metrics_that_cannot_be_told(fake: FakeNvml) -> None:
    fake.fail("metric 5", fake_nvml.NOT_SUPPORTED)
    fake.fail("metric 10", fake_nvml.NO_PERMISSION)
    with Gpm(0, clock=fake.clock) as gpm:
        fake.run(1, sm_active=nan, sm_occupancy=25, tensor_active=50, dram_bandwidth=50)
        busy = gpm.read()
    assert (busy.sm_active, busy.sm_occupancy, busy.tensor_active, busy.dram_bandwidth) == (None, 0.25, None, None)
    assert busy.dram_bytes_per_s is None
    assert busy.unavailable == {
        "sm_active": "NVML gave no number",
        "tensor_active": REASONS[3],
        "dram_bandwidth": REASONS[4],
    }


# Doctor


def test_doctor_tells_of_each_gpu(fake: FakeNvml) -> None:
    fake.reset(replace(GPUS["h200"], event_reasons=0x4, mig=1), "rtx4090", "a100")
    fake.process(os.getpid(), 1 << 30)
    fake.process(4242, 3 << 30)
    fake.process(77, -1, "graphics", gpu=1)
    fake.process(os.getpid(), 1 << 30, gpu=2)
    facts = doctor.examine()
    section = facts["nvml"]
    assert isinstance(section, dict) and section["missing"] is None
    assert [gpu["index"] for gpu in section["gpus"]] == [0, 1, 2]
    assert {"pid": 4242, "memory_bytes": 3 << 30} in section["gpus"][0]["processes"]
    json.dumps(facts)
    text = "\n".join(doctor_lines.lines(facts))
    assert "GPU 0, NVIDIA H200, driver 580.159.03, CUDA 13.0, compute capability 9.0, 139.9 of 140.4 GiB free" in text
    assert "SMs at 345 of 1980 MHz, 31 C, 76 of 700 W" in text
    assert "disturbed: pid 4242 with 3.0 GiB\n" in text and "disturbed: pid 77\n" in text
    assert str(os.getpid()) not in text
    assert "held down: power cap" in text and "MIG mode is on" in text
    assert "not known: mig (this GPU does not support it)" in text


def test_doctor_without_a_gpu_or_permission(fake: FakeNvml) -> None:
    fake.reset()
    assert "nvml      no GPU is visible" in doctor_lines.lines(doctor.examine())
    fake.reset("h200", "h100")
    fake.fail("nvmlDeviceGetHandleByIndex_v2", fake_nvml.NO_PERMISSION, nth=3, forever=True)
    facts = doctor.examine()
    section = facts["nvml"]
    assert isinstance(section, dict)
    assert section["gpus"][1] == {
        "index": 1,
        "unavailable": {"device": "GPU 1: not permitted here", "processes": "GPU 1: not permitted here"},
    }
    assert doctor_lines.lines(facts)[-2:] == [
        "nvml      GPU 1",
        "          not known: device, processes (GPU 1: not permitted here)",
    ]
    fake.reset("h200")
    fake.fail("nvmlDeviceGetCount_v2", fake_nvml.UNKNOWN)
    assert "nvml      NVML cannot count GPUs: NVML says Unknown Error (999)" in doctor_lines.lines(doctor.examine())


# The fake itself


def test_the_fake_is_strict(library: FakeNvml) -> None:
    library.reset("h200", "h100")
    with library.served() as pynvml:

        def broken(rule: str, call: Callable[[], object]) -> None:
            before = len(library.misuse())
            with pytest.raises(pynvml.NVMLError):
                call()
            assert [rule in line for line in library.misuse()[before:]] == [True], library.misuse()[before:]

        pynvml.nvmlInit()
        gpu, other = (pynvml.nvmlDeviceGetHandleByIndex(i) for i in (0, 1))
        first, second = pynvml.nvmlGpmSampleAlloc(), pynvml.nvmlGpmSampleAlloc()
        request = pynvml.c_nvmlGpmMetricsGet_t(version=1, numMetrics=1, sample1=first, sample2=second)
        request.metrics[0].metricId = 2
        broken("not both taken", lambda: pynvml.nvmlGpmMetricsGet(request))
        pynvml.nvmlGpmSampleGet(gpu, first)
        pynvml.nvmlGpmSampleGet(other, second)
        broken("from one GPU", lambda: pynvml.nvmlGpmMetricsGet(request))
        pynvml.nvmlGpmSampleGet(gpu, second)
        pynvml.nvmlGpmMetricsGet(request)
        assert library.misuse()[-1] == "nvmlGpmMetricsGet: samples 0 ms apart"
        request.version = 2
        broken("version 2", lambda: pynvml.nvmlGpmMetricsGet(request))
        pynvml.nvmlGpmSampleFree(first)
        broken("not allocated", lambda: pynvml.nvmlGpmSampleFree(first))
        broken("not allocated", lambda: pynvml.nvmlGpmSampleGet(gpu, first))
        pynvml.nvmlShutdown()
        assert library.misuse()[-1] == "nvmlShutdown: 1 samples not freed"
        broken("outside a session", lambda: pynvml.nvmlDeviceGetName(gpu))
        pynvml.nvmlInit()
        broken("no handle of this session", lambda: pynvml.nvmlDeviceGetName(gpu))
        pynvml.nvmlShutdown()
        broken("outside a session", pynvml.nvmlShutdown)


def test_the_process_never_takes_the_fake_for_the_real_library(library: FakeNvml) -> None:
    own = sys.modules.get("pynvml")
    with library.served() as served:
        assert sys.modules["pynvml"] is served is not own
    assert sys.modules.get("pynvml") is own
    assert own is None or own.nvmlLib is None or not hasattr(own.nvmlLib, "fake_reset")
    try:
        real = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return
    assert not hasattr(real, "fake_reset")


def test_another_process_finds_the_library_by_its_name() -> None:
    program = """
import ctypes, sys
import fake_nvml
fake = fake_nvml.FakeNvml(ctypes.CDLL("libnvidia-ml.so.1"))
fake.reset("b200")
from smpart.partition.cuda.nvml import device_facts
assert device_facts(0)["compute_capability"] == "10.0" and not fake.misuse()
"""
    paths = [str(Path(fake_nvml.__file__).parent), *sys.path]
    environment = os.environ | {
        "LD_LIBRARY_PATH": str(fake_nvml.build().parent),
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
    }
    subprocess.run([sys.executable, "-c", program], env=environment, check=True, timeout=120)
