"""The fake driver itself: versions, devices, splits, green contexts, faults."""

import ctypes
from typing import Any

import fake_cuda
import pytest
from cuda.bindings import driver as cu
from cuda_calls import SM, Lanes, code, green, ok, split
from fake_cuda import Fake
from hypothesis import given
from hypothesis import strategies as st

ALL = fake_cuda.DRIVERS
WORKQUEUE = cu.CUdevResourceType.CU_DEV_RESOURCE_TYPE_WORKQUEUE_CONFIG
FINE = 1  # CU_DEV_SM_RESOURCE_SPLIT_IGNORE_SM_COSCHEDULING


def groups(*wanted: tuple[int, ...]) -> list[Any]:
    """Parameters of a structured split: (count, coscheduled, backfill)."""
    made = []
    for count, together, backfill in wanted:
        params = cu.CU_DEV_SM_RESOURCE_GROUP_PARAMS()
        params.smCount, params.coscheduledSmCount, params.flags = count, together, backfill
        made.append(params)
    return made


def structured(device: Any, *wanted: tuple[int, ...]) -> tuple[Any, ...]:
    return cu.cuDevSmResourceSplit(len(wanted), device, 0, groups(*wanted))


# ---- Versions ---------------------------------------------------------------------------------------------------


def found(name: str, asked: int) -> tuple[bool, int]:
    """Whether cuGetProcAddress knows a function, and its CUdriverProcAddressQueryResult."""
    address, status = ctypes.c_void_p(), ctypes.c_int()
    look = ctypes.CDLL("libcuda.so.1").cuGetProcAddress_v2
    look(name.encode(), ctypes.byref(address), asked, ctypes.c_uint64(0), ctypes.byref(status))
    return bool(address), status.value


@pytest.mark.drivers(*ALL)
@pytest.mark.parametrize(
    ("name", "since"),
    [
        ("cuGreenCtxCreate", 12.4),
        ("cuGreenCtxStreamCreate", 12.5),
        ("cuGreenCtxGetId", 13.0),
        ("cuDevSmResourceSplit", 13.1),
        ("cuStreamGetDevResource", 13.1),
    ],
)
def test_a_function_is_there_from_its_version_on(fake: Fake, name: str, since: float) -> None:
    there = float(fake.driver) >= since
    assert found(name, 13050) == ((True, 0) if there else (False, 1))
    assert found(name, 12000) == (False, 2 if there else 1)  # there, but newer than what was asked for


@pytest.mark.drivers(*ALL)
def test_an_older_driver_says_less_of_a_resource(fake: Fake) -> None:
    resource = ok(cu.cuDeviceGetDevResource(0, SM))
    known = float(fake.driver) >= 13.0  # the fields came with 13.0
    assert (resource.sm.minSmPartitionSize, resource.sm.smCoscheduledAlignment) == ((8, 8) if known else (0, 0))
    answer = cu.cuDeviceGetDevResource(0, WORKQUEUE)
    assert code(answer) == ("SUCCESS" if float(fake.driver) >= 13.1 else "INVALID_RESOURCE_TYPE")


@pytest.mark.drivers(*ALL)
def test_nothing_before_init(fake: Fake) -> None:
    fake.reset(initialised=0)
    major, minor = map(int, fake.driver.split("."))
    assert ok(cu.cuDriverGetVersion()) == 1000 * major + 10 * minor
    assert code(cu.cuDeviceGetCount()) == "NOT_INITIALIZED"
    assert fake.take_misuse() == ["cuDeviceGetCount: called before cuInit"]
    ok(cu.cuInit(0))
    assert ok(cu.cuDeviceGetCount()) == 1


def test_a_machine_without_a_gpu(fake: Fake) -> None:
    fake.reset(None, initialised=0)
    assert code(cu.cuInit(0)) == "NO_DEVICE"


@pytest.mark.drivers(*ALL)
@pytest.mark.parametrize(
    ("gpu", "sms", "capability", "rules"),
    [
        ("a100", 108, (8, 0), (4, 2)),
        ("h100", 132, (9, 0), (8, 8)),
        ("h100-pcie", 114, (9, 0), (8, 8)),
        ("h200", 132, (9, 0), (8, 8)),
        ("b200", 148, (10, 0), (8, 8)),
        ("rtx4090", 128, (8, 9), (4, 2)),
        ("l40s", 142, (8, 9), (4, 2)),
        ("rtx5090", 170, (12, 0), (8, 8)),
    ],
)
def test_the_gpus(fake: Fake, gpu: str, sms: int, capability: tuple[int, int], rules: tuple[int, int]) -> None:
    fake.reset(gpu)
    attributes = cu.CUdevice_attribute
    names = ("MULTIPROCESSOR_COUNT", "COMPUTE_CAPABILITY_MAJOR", "COMPUTE_CAPABILITY_MINOR")
    facts = [ok(cu.cuDeviceGetAttribute(getattr(attributes, f"CU_DEVICE_ATTRIBUTE_{name}"), 0)) for name in names]
    assert facts == [sms, *capability]
    minimum, alignment = rules
    made, rest = split(1)
    assert (made[0].sm.smCount, rest.sm.smCount) == (minimum, sms - minimum)
    made, rest = split(minimum + 1)
    assert made[0].sm.smCount == minimum + alignment


# ---- Splits -----------------------------------------------------------------------------------------------------


@pytest.mark.drivers(*ALL)
def test_splits_by_count_that_were_seen_on_132_sms(fake: Fake) -> None:
    for asked, want in {(72, 2, 0): ([72], 60), (11, 6, 0): ([16] * 6, 36), (11, 6, FINE): ([12] * 6, 60)}.items():
        made, rest = split(*asked)
        assert ([group.sm.smCount for group in made], rest.sm.smCount) == want


@given(count=st.integers(0, 132), wanted=st.integers(1, 20), fine=st.booleans())
def test_a_split_by_count_makes_equal_disjoint_groups(driver: Fake, count: int, wanted: int, fine: bool) -> None:
    driver.reset()
    step = 2 if fine else 8
    each = max(step, -(-count // step) * step)
    device = ok(cu.cuDeviceGetDevResource(0, SM))
    answer = cu.cuDevSmResourceSplitByCount(wanted, device, FINE if fine else 0, count)
    if each > 132:
        assert code(answer) == "INVALID_RESOURCE_CONFIGURATION"
        return
    made, number, rest = ok(answer)
    assert number == min(wanted, 132 // each)
    assert all(group.sm.smCount == each for group in made[:number])
    assert rest.sm.smCount == 132 - number * each
    assert driver.misuse() == []


def test_what_a_split_refuses(fake: Fake) -> None:
    device = ok(cu.cuDeviceGetDevResource(0, SM))
    assert code(cu.cuDevSmResourceSplitByCount(1, device, 0, 133)) == "INVALID_VALUE"
    assert code(cu.cuDevSmResourceSplitByCount(1, device, 4, 8)) == "INVALID_VALUE"
    empty = cu.CUdevResource()
    assert code(cu.cuDevSmResourceSplitByCount(1, empty, 0, 8)) == "INVALID_RESOURCE_TYPE"
    assert fake.misuse() == []


def test_nothing_left_is_no_resource(fake: Fake) -> None:
    fake.reset("rtx4090")
    assert split(128)[1].type == cu.CUdevResourceType.CU_DEV_RESOURCE_TYPE_INVALID


def test_a_split_is_not_split_again(fake: Fake) -> None:
    device = ok(cu.cuDeviceGetDevResource(0, SM))
    (group, *_), _, rest = ok(cu.cuDevSmResourceSplitByCount(1, device, 0, 64))
    for resource in (device, group, rest):
        assert code(cu.cuDevSmResourceSplitByCount(1, resource, 0, 8)) == "INVALID_RESOURCE_CONFIGURATION"
    before, product, remainder = fake.take_misuse()
    assert "was split before" in before
    assert "product of a split" in product and product == remainder
    made = green(group)
    queried = ok(cu.cuGreenCtxGetDevResource(made, SM))
    assert ok(cu.cuDevSmResourceSplitByCount(1, queried, 0, 8))[2].sm.smCount == 56
    ok(cu.cuGreenCtxDestroy(made))


def test_resources_are_not_written_by_hand(fake: Fake) -> None:
    made, _ = split(48)
    made[0].sm.smCount = 56
    assert code(cu.cuDevResourceGenerateDesc(made, 1)) == "INVALID_RESOURCE_CONFIGURATION"
    assert fake.take_misuse() == ["cuDevResourceGenerateDesc: the resource says 56 SMs, it was given out with 48"]


def test_a_descriptor_joins_parts_of_one_split_only(fake: Fake) -> None:
    (a, b), rest = split(32, groups=2)
    whole = green(a, b, rest)
    assert ok(cu.cuGreenCtxGetDevResource(whole, SM)).sm.smCount == 132
    ok(cu.cuGreenCtxDestroy(whole))
    (other,), _ = split(32)
    assert code(cu.cuDevResourceGenerateDesc([a, other], 2)) == "INVALID_RESOURCE_CONFIGURATION"
    assert len(fake.take_misuse()) == 1


def test_a_topology_that_refuses_aligned_counts(fake: Fake) -> None:
    fake.reset("h100", topology="refuses-aligned")
    device = ok(cu.cuDeviceGetDevResource(0, SM))
    assert code(cu.cuDevSmResourceSplitByCount(1, device, 0, 40)) == "INVALID_RESOURCE_CONFIGURATION"
    assert split(40, flags=FINE)[0][0].sm.smCount == 40
    assert split(48)[0][0].sm.smCount == 48  # the next size
    if fake.driver == "13.1":
        assert code(structured(device, (40, 0, 0))) == "INVALID_RESOURCE_CONFIGURATION"
        assert ok(structured(device, (40, 0, 1)))[1].sm.smCount == 92


def test_answers_shorter_than_asked_for(fake: Fake) -> None:
    fake.reset(short_rest=4, short_context=2)
    (group, *_), rest = split(48)
    assert (group.sm.smCount, rest.sm.smCount) == (48, 80)
    made = green(group)
    assert ok(cu.cuGreenCtxGetDevResource(made, SM)).sm.smCount == 46
    ok(cu.cuGreenCtxDestroy(made))


@pytest.mark.drivers("13.1")
def test_structured_splits(fake: Fake) -> None:
    device = ok(cu.cuDeviceGetDevResource(0, SM))
    for wrong in ((7, 0, 0), (12, 0, 0), (136, 0, 0), (8, 3, 0), (8, 34, 0)):
        assert code(structured(device, wrong)) == "INVALID_RESOURCE_CONFIGURATION"
    made, rest = ok(structured(device, (40, 0, 0), (64, 0, 0)))
    assert ([group.sm.smCount for group in made], rest.sm.smCount) == ([40, 64], 28)
    made, rest = ok(structured(ok(cu.cuDeviceGetDevResource(0, SM)), (24, 0, 0), (0, 2, 1)))
    assert [group.sm.smCount for group in made] == [24, 108]
    assert rest.type == cu.CUdevResourceType.CU_DEV_RESOURCE_TYPE_INVALID


@pytest.mark.drivers("13.1")
def test_workqueues(primary: Any, fake: Fake) -> None:
    config = ok(cu.cuDeviceGetDevResource(0, WORKQUEUE))
    assert config.wqConfig.sharingScope == cu.CUdevWorkqueueConfigScope.CU_WORKQUEUE_SCOPE_DEVICE_CTX
    balanced = cu.CUdevWorkqueueConfigScope.CU_WORKQUEUE_SCOPE_GREEN_CTX_BALANCED
    config.wqConfig.sharingScope, config.wqConfig.wqConcurrencyLimit = balanced, 2
    (group, *_), _ = split(48)
    made = green(group, config)
    back = ok(cu.cuGreenCtxGetDevResource(made, WORKQUEUE)).wqConfig
    assert (back.sharingScope, back.wqConcurrencyLimit) == (balanced, 2)
    ok(cu.cuGreenCtxDestroy(made))


# ---- Faults -----------------------------------------------------------------------------------------------------


def test_a_fault_strikes_the_nth_call_only(fake: Fake) -> None:
    fake.fail("cuDeviceGetDevResource", nth=2, code=cu.CUresult.CUDA_ERROR_NOT_SUPPORTED)
    answers = [code(cu.cuDeviceGetDevResource(0, SM)) for _ in range(4)]
    assert answers == ["SUCCESS", "NOT_SUPPORTED", "SUCCESS", "SUCCESS"]
    fake.fail("cuDeviceGetDevResource", code=801, times=None)
    assert {code(cu.cuDeviceGetDevResource(0, SM)) for _ in range(4)} == {"NOT_SUPPORTED"}
    with pytest.raises(ValueError, match="no cuNonsense"):
        fake.fail("cuNonsense")


def test_a_call_that_fails_has_no_effect(primary: Any, fake: Fake) -> None:
    fake.fail("cuEventCreate", code=2)
    assert code(cu.cuEventCreate(0)) == "OUT_OF_MEMORY"
    assert "event" not in fake.live()


def test_an_asynchronous_error_comes_late_and_once(lanes: Lanes, fake: Fake) -> None:
    fake.fail_async(cu.CUresult.CUDA_ERROR_UNKNOWN, after=3)
    answers = [code(cu.cuEventRecord(lanes.events[0], lanes.streams[0])) for _ in range(4)]
    assert answers == ["SUCCESS", "SUCCESS", "UNKNOWN", "SUCCESS"]
    lanes.drain()


def test_a_sticky_error_poisons_all_but_what_frees(primary: Any, fake: Fake) -> None:
    made = Lanes()
    fake.fail_async(cu.CUresult.CUDA_ERROR_ILLEGAL_ADDRESS)
    record = cu.cuEventRecord(made.events[0], made.streams[0])
    rest = (cu.cuStreamSynchronize(made.streams[1]), cu.cuEventCreate(0), cu.cuStreamDestroy(made.streams[0]))
    assert {code(answer) for answer in (record, *rest)} == {"ILLEGAL_ADDRESS"}
    assert ok(cu.cuDeviceGetCount()) == 1
    for event in made.events:
        cu.cuEventDestroy(event)
    cu.cuStreamDestroy(made.streams[1])
    for each in made.greens:
        cu.cuGreenCtxDestroy(each)
    assert fake.live() == {"primary context": 1}


def test_calls_are_written_down(fake: Fake) -> None:
    split(48)
    assert fake.calls() == [
        ("cuDeviceGetDevResource", 0, 1),
        ("cuDevSmResourceSplitByCount", 1, 132, 0, 48),
    ]
    assert fake.calls("cuDeviceGetDevResource") == [("cuDeviceGetDevResource", 0, 1)]
