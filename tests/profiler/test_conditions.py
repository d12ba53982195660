"""Conditions against the fake NVML: what is told is stored, and nothing that fails stops a sweep."""

import sys
from collections.abc import Iterator
from dataclasses import replace

import fake_nvml
import pytest
from fake_nvml import GPUS, FakeNvml

from smpart.partition import Device
from smpart.profiler.conditions import watched
from smpart.profiler.sample import Conditions

WARM = replace(GPUS["h200"], sm_mhz=1830, memory_mhz=3201, temperature_c=67, power_mw=512_250)
READS = ("nvmlDeviceGetClockInfo", "nvmlDeviceGetTemperature", "nvmlDeviceGetPowerUsage")


def gpu(uuid: str) -> Device:
    return Device("NVIDIA H200", "cuda", 132, tuple(range(132)), 2**37, {"uuid": uuid})


@pytest.fixture(scope="module")
def library() -> FakeNvml:
    if (why := fake_nvml.missing()) is not None:
        pytest.skip(why)
    return fake_nvml.load()


@pytest.fixture
def fake(library: FakeNvml) -> Iterator[FakeNvml]:
    """A machine whose second GPU is warm; afterwards no rule is broken and nothing is left open."""
    library.reset("a100", WARM)
    with library.served():
        yield library
    assert library.misuse() == []
    assert library.live() == {"sessions": 0, "samples": 0}


def test_clocks_temperature_and_power(fake: FakeNvml) -> None:
    with watched(gpu(fake_nvml.uuid(1))) as conditions:
        assert conditions() == Conditions(1830, 3201, 67, 512.25)
        assert fake.live()["sessions"] == 1


@pytest.mark.parametrize(
    "device", [Device("x", "cpu", 2, (0, 1), 2**30), Device("x", "sim", 132, (), 2**37), Device("x", "cuda", 1, (), 1)]
)
def test_what_is_no_gpu_has_none_and_asks_nobody(fake: FakeNvml, device: Device) -> None:
    with watched(device) as conditions:
        assert conditions() == Conditions()
    assert fake.calls() == []


@pytest.mark.parametrize("code", [fake_nvml.NOT_SUPPORTED, fake_nvml.NO_PERMISSION, fake_nvml.UNKNOWN])
@pytest.mark.parametrize("function", READS)
def test_what_cannot_be_read_is_none(fake: FakeNvml, function: str, code: int) -> None:
    fake.fail(function, code, forever=True)
    with watched(gpu(fake_nvml.uuid(1))) as conditions:
        read = conditions()
    assert (read.sm_mhz is None) == (read.memory_mhz is None) == (function == READS[0])
    assert (read.celsius is None) == (function == READS[1])
    assert (read.watts is None) == (function == READS[2])


@pytest.mark.parametrize("nth", range(1, 8))
def test_a_gpu_lost_at_any_moment_stops_nothing(fake: FakeNvml, nth: int) -> None:
    with watched(gpu(fake_nvml.uuid(1))) as conditions:
        for function in ("nvmlInitWithFlags", "nvmlDeviceGetHandleByUUID", *READS):
            fake.fail(function, fake_nvml.GPU_IS_LOST, nth=nth, forever=True)
        for _ in range(nth):
            conditions()
        assert conditions() == Conditions()


def test_an_unknown_gpu_is_logged(fake: FakeNvml, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "smpart"), watched(gpu("GPU-nowhere")) as conditions:
        assert conditions() == Conditions()
    assert "NVML knows no such GPU" in caplog.text


def test_no_nvml(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with caplog.at_level("INFO", "smpart"), watched(gpu("GPU-any")) as conditions:
        assert conditions() == Conditions()
    assert len(caplog.records) == 1 and "nvidia-ml-py is missing" in caplog.text
