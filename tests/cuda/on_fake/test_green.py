"""Green contexts on the fake driver: what is made, on which chip and driver, and what happens when a call fails."""

import dataclasses
import itertools
import threading
from types import TracebackType

import pytest
from fake_cuda import Fake

from smpart.errors import BackendUnavailable, SmpartError, UsageError
from smpart.partition import Backend, Side, Split, open_backend
from smpart.partition.cuda.driver import CudaError, driver
from smpart.partition.cuda.gpu import Gpu
from smpart.partition.cuda.sm_probe import read_sms
from smpart.partition.green import Green, GreenPlaces

ALL = ("12.4", "12.8", "13.0", "13.1")
SHAPES = {
    "a100": (108, 4, 2),
    "h100": (132, 8, 8),
    "h100-pcie": (114, 8, 8),
    "h200": (132, 8, 8),
    "b200": (148, 8, 8),
    "rtx4090": (128, 4, 2),
    "l40s": (142, 4, 2),
    "rtx5090": (170, 8, 8),
}


@pytest.mark.drivers(*ALL)
@pytest.mark.parametrize("gpu", SHAPES)
def test_every_split_has_both_its_sides_on_sms_of_their_own(fake: Fake, gpu: str) -> None:
    fake.reset(gpu)
    units, minimum, step = SHAPES[gpu]
    with Green().open() as places:
        splits = places.splits()
        shared = [split for split in splits if not split.exclusive]
        assert 5 <= len(shared) <= 18 and not places.refused
        assert {split.total for split in splits} == {units} and {Split(0, units), Split(units, 0)} < set(splits)
        assert all(s.prefill % step == 0 and min(s.prefill, s.decode) >= minimum for s in shared)
        for (side, split), place in places.all().items():
            assert place.units == split.units(side) == places.read_back(place)
        # One cut a split: two would both start from the whole device.
        cuts = [call for call in fake.calls() if call[0].startswith("cuDevSmResourceSplit")]
        assert len(cuts) == len(shared)


@pytest.mark.drivers(*ALL)
def test_nothing_is_left_and_the_order_is_right(fake: Fake) -> None:
    places = Green().open()
    made = len(places.all())
    fake.forget_calls()
    places.close()
    places.close()
    names = [name for name, *_ in fake.calls()]
    assert names.count("cuStreamSynchronize") == names.count("cuStreamDestroy") == made
    assert names.count("cuGreenCtxDestroy") == made - 2
    assert names.index("cuStreamDestroy") > max(i for i, n in enumerate(names) if n == "cuStreamSynchronize")
    assert names[-1] == "cuDevicePrimaryCtxRelease"
    assert fake.live() == {}


@pytest.mark.drivers(*ALL)
def test_streams_belong_to_their_contexts_and_decode_goes_first(fake: Fake) -> None:
    with Green().open() as places:
        for (side, split), place in places.all().items():
            assert (place.green is None) == split.exclusive
            assert driver()("cuStreamGetFlags", place.stream) & 1
            priority = driver()("cuStreamGetPriority", place.stream)
            assert (priority < 0) == (side is Side.DECODE)
            owner = driver()("cuStreamGetGreenCtx", place.stream)
            assert int(owner or 0) == int(place.green or 0)


@pytest.mark.drivers("13.1")
def test_a_recent_driver_cuts_both_groups_in_one_call_and_gives_each_a_queue(fake: Fake) -> None:
    with Green().open() as places:
        assert set(places.how.values()) == {"two groups in one split", "the primary context"}
        assert not fake.calls("cuDevSmResourceSplitByCount")
    described = fake.calls("cuDevResourceGenerateDesc")
    assert described and all(call[-1] == 2 for call in described), described[0]


@pytest.mark.drivers("13.1")
def test_where_the_driver_has_queues_each_lane_has_one_that_is_its_own(fake: Fake) -> None:
    types, scopes = driver().api.CUdevResourceType, driver().api.CUdevWorkqueueConfigScope
    with Green().open(step=56) as places:
        for place in places.all().values():
            if place.green is not None:
                kind = types.CU_DEV_RESOURCE_TYPE_WORKQUEUE_CONFIG
                queue = driver()("cuGreenCtxGetDevResource", place.green, kind).wqConfig
                assert queue.sharingScope == scopes.CU_WORKQUEUE_SCOPE_GREEN_CTX_BALANCED
                assert queue.wqConcurrencyLimit == 1


@pytest.mark.drivers("13.0")
def test_an_older_driver_takes_a_group_and_the_remainder(fake: Fake) -> None:
    with Green().open() as places:
        assert set(places.how.values()) == {"one group by count, and the remainder", "the primary context"}
    assert all(call[-1] == 1 for call in fake.calls("cuDevResourceGenerateDesc"))


@pytest.mark.drivers("12.8", "13.0")
@pytest.mark.parametrize(("version", "directly"), [((12, 4), False), ((12, 5), True)])
def test_since_12_5_a_green_context_makes_its_own_streams(
    fake: Fake, monkeypatch: pytest.MonkeyPatch, version: tuple[int, int], directly: bool
) -> None:
    monkeypatch.setattr(driver(), "version", version)
    with Green().open(step=56) as places:
        contexts = sum(place.green is not None for place in places.all().values())
        assert len(fake.calls("cuGreenCtxStreamCreate")) == (contexts if directly else 0)
        for place in places.all().values():
            assert int(driver()("cuStreamGetGreenCtx", place.stream) or 0) == int(place.green or 0)


@pytest.mark.drivers("12.4")
def test_the_oldest_driver_makes_streams_by_way_of_the_context(fake: Fake) -> None:
    with Green().open():
        assert not fake.calls("cuGreenCtxStreamCreate")


@pytest.mark.drivers("13.0")
def test_what_the_contexts_take_is_told(fake: Fake) -> None:
    with Green().open() as places:
        assert places.memory_bytes == 0
    fake.reset("h200", context_bytes=3 << 20)
    with Green().open() as places:
        assert places.memory_bytes == 30 * (3 << 20)
        assert str(places) == "17 splits, 30 contexts, 90 MiB"
        with Green().open(step=56) as more:
            assert more.memory_bytes == 4 * (3 << 20)


@pytest.mark.drivers(*ALL)
def test_a_topology_that_refuses_is_met_by_a_looser_rule(fake: Fake) -> None:
    fake.reset("h200", topology="refuses-aligned")
    with Green().open() as places:
        assert not places.refused
        loose = [split for split, how in places.how.items() if "backfilled" in how or "without" in how]
        assert loose and all(split.prefill % 16 for split in loose)


@pytest.mark.drivers(*ALL)
def test_a_split_that_loses_sms_is_not_made_and_said_so(fake: Fake) -> None:
    fake.reset("h200", short_rest=3)
    if fake.driver == "13.1":
        pytest.skip("there the second group takes what is left, and no remainder is used")
    with Green().open() as places:
        assert [split.exclusive for split in places.splits()] == [True, True]
        assert len(places.refused) == 15 and str(places).endswith(" MiB, 15 splits refused by the device")
        assert set(places.refused.values()) == {"this chip's topology gives no such partition"}


@pytest.mark.drivers(*ALL)
def test_fewer_sms_than_asked_for_are_an_error_not_a_silence(fake: Fake) -> None:
    fake.reset("h200", short_context=2)
    with pytest.raises(BackendUnavailable, match=r"split 8/124: the driver gave prefill 6 SMs instead of 8"):
        Green().open()
    assert fake.live() == {}


@pytest.mark.drivers(*ALL)
def test_whatever_call_fails_the_error_is_clear_and_nothing_is_left(fake: Fake) -> None:
    """One call after another of a whole life fails once."""
    with Green().open(step=56):
        pass
    names = [name for name, *_ in fake.calls()]
    failed = 0
    for name in sorted(set(names)):
        for nth in range(1, names.count(name) + 1):
            fake.reset()
            fake.fail(name, nth, code=999)
            try:
                with Green().open(step=56):
                    pass
            except SmpartError as error:
                assert name in str(error) and "CUDA_ERROR_UNKNOWN (999)" in str(error)
                failed += 1
            else:  # while giving back, the rest is given back all the same
                assert name.endswith(("Destroy", "Release", "Synchronize", "PopCurrent")) or name == "cuGetErrorString"
            leaked = sum(fake.live().values())
            assert leaked <= (name.endswith(("Destroy", "Release")) or name == "cuCtxPopCurrent"), (
                name,
                nth,
                fake.live(),
            )
            fake.take_misuse()
    assert failed >= 30
    fake.reset()


@pytest.mark.drivers("13.0")
def test_a_lost_device_is_closed_without_a_word_too_many(fake: Fake) -> None:
    places = Green().open(step=56)
    fake.fail_async(700)
    with pytest.raises(CudaError, match="restart"):
        driver()("cuStreamSynchronize", next(iter(places.all().values())).stream)
    places.close()
    fake.excuse_live()
    fake.take_misuse()


@pytest.mark.drivers("13.0")
def test_two_splits_are_not_disjoint_until_their_sms_were_seen(fake: Fake) -> None:
    with Green().open() as places:
        pairs = list(itertools.product(places.splits(), repeat=2))
        assert all(places.disjoint(p, d) == (p == d and not p.exclusive) for p, d in pairs)
        sms = {key: frozenset(key[1].indices(key[0], 132)) for key in places.all()}
        for side in Side:  # of one side's SMs alone nothing follows
            places.learn({key: found for key, found in sms.items() if key[0] is side})
            assert all(places.disjoint(p, d) == (p == d and not p.exclusive) for p, d in pairs)
        places.learn(sms)
        for prefill, decode in pairs:
            apart = prefill.prefill + decode.decode <= 132 and not prefill.exclusive and not decode.exclusive
            assert places.disjoint(prefill, decode) == apart
        swapped = Split(64, 68)
        with pytest.raises(BackendUnavailable, match=r"split 64/68: both lanes ran on SMs \[63\]"):
            places.learn(sms | {(Side.DECODE, swapped): frozenset(range(63, 131))})
        with pytest.raises(BackendUnavailable, match=r"decode lane ran on 67 SMs, not on 68"):
            places.learn({(Side.DECODE, swapped): frozenset(range(67))})


@pytest.mark.drivers("13.0")
def test_a_step_of_ones_own(fake: Fake) -> None:
    with Green().open(step=32) as places:
        assert [str(split) for split in places.splits()] == ["0/132", "32/100", "64/68", "96/36", "132/0"]
    with Green().open(step=8) as places:
        assert len(places.splits()) == 17
    for step in (0, 4, 12, -8):
        with pytest.raises(UsageError, match=f"step {step}: NVIDIA H200 hands out SMs in steps of 8; use a multiple"):
            Green().open(step)


@pytest.mark.drivers(*ALL)
def test_the_backend_tells_of_its_device_and_takes_nothing(fake: Fake) -> None:
    backend = open_backend("green")
    assert isinstance(backend, Backend) and backend.name == "green" and backend.why_unusable() is None
    device = backend.device()
    assert (device.name, device.kind, device.units) == ("NVIDIA H200", "cuda", 132)
    assert device.unit_ids == tuple(range(132)) and device.memory_bytes > 140e9
    assert device.facts["compute_capability"] == "9.0" and device.facts["driver_cuda"] == fake.driver
    assert str(device.facts["uuid"]).startswith("GPU-")
    assert len(backend.splits()) == 17
    assert fake.live() == {}


@pytest.mark.drivers("13.0")
def test_why_it_cannot_be_used(fake: Fake) -> None:
    fake.reset(None)
    why = Green().why_unusable()
    assert why is not None and "no NVIDIA device is visible" in why


@pytest.mark.drivers("13.0")
def test_which_driver_is_too_old(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver(), "version", (12, 4))
    assert Green().why_unusable() is None
    monkeypatch.setattr(driver(), "version", (12, 3))
    assert Green().why_unusable() == (
        "green contexts need a driver of CUDA 12.4 or later; this one is of 12.3: update it"
    )


@pytest.mark.drivers("13.0")
def test_which_gpu_is_too_small(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    def of(units: int) -> None:
        monkeypatch.setattr(Gpu, "find", lambda api: dataclasses.replace(gpu, units=units))

    gpu = Gpu.find(driver())
    of(16)
    assert Green().why_unusable() is None
    of(15)
    assert Green().why_unusable() == "NVIDIA H200 has 15 SMs: too few to split (groups of 8 or more)"


class Turnstile:
    """A lock that tells when somebody stands before it."""

    def __init__(self) -> None:
        self.came = threading.Semaphore(0)
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        self.came.release()
        self._lock.acquire()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._lock.release()


@pytest.mark.drivers("13.0")
def test_two_threads_ask_a_context_one_after_the_other(fake: Fake) -> None:
    with Green().open(step=56) as places:
        turnstile = places._one_at_a_time = Turnstile()  # type: ignore[assignment]
        place = next(place for place in places.all().values() if place.green is not None)
        seen: list[int] = []
        asking = [threading.Thread(target=lambda: seen.append(places.read_back(place))) for _ in range(2)]
        with fake.held("cuGreenCtxGetDevResource"):
            asking[0].start()
            fake.wait_held()
            asking[1].start()
            assert turnstile.came.acquire(timeout=20) and turnstile.came.acquire(timeout=20)
        for thread in asking:
            thread.join()
        assert seen == [place.units] * 2


@pytest.mark.drivers("13.0")
def test_what_cannot_be_given_back_is_said(fake: Fake, caplog: pytest.LogCaptureFixture) -> None:
    places = Green().open(step=56)
    fake.fail("cuGreenCtxDestroy", code=999)
    places.close()
    (record,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert record.getMessage().startswith("while giving back the device: cuGreenCtxDestroy failed with")
    assert fake.live() == {"green context": 1}
    fake.excuse_live()


@pytest.mark.drivers("13.0")
def test_a_gpu_knows_a_step_whose_contexts_it_can_afford(fake: Fake) -> None:
    for name in SHAPES:
        fake.reset(name)
        gpu = Gpu.find(driver())
        assert gpu.lane_step % gpu.step == 0
        assert len(gpu.splits()) <= 20 < len(gpu.splits(gpu.step)) or gpu.lane_step == gpu.step


@pytest.mark.drivers("13.0")
def test_places_are_numbers_for_torch_and_cupy(fake: Fake) -> None:
    with Green().open(step=56) as places:
        assert isinstance(places, GreenPlaces)
        assert len({place.handle for place in places.all().values()}) == len(places.all())


@pytest.mark.drivers("13.0", "13.1")
@pytest.mark.parametrize("gpu", ["h200", "a100", "rtx5090"])
def test_a_kernel_sees_the_sms_of_every_place(fake: Fake, gpu: str) -> None:
    fake.reset(gpu)
    with Green().open() as places:
        sms = read_sms(driver(), places.gpu, places)
        assert {key: len(found) for key, found in sms.items()} == {k: p.units for k, p in places.all().items()}
        places.learn(sms)
        shared = [split for split in places.splits() if not split.exclusive]
        assert all(not sms[Side.PREFILL, s] & sms[Side.DECODE, s] for s in shared)
        assert all(places.disjoint(a, b) for a, b in itertools.pairwise(shared))  # this driver nests them
    assert not fake.live()


@pytest.mark.drivers("13.0")
def test_whatever_call_of_the_probe_fails_nothing_is_left(fake: Fake) -> None:
    with Green().open(step=56) as places:
        before = fake.live()
        fake.forget_calls()
        read_sms(driver(), places.gpu, places)
        for name in sorted({name for name, *_ in fake.calls()} - {"cuCtxPopCurrent", "cuGetErrorString"}):
            fake.fail(name)
            with pytest.raises(CudaError, match=name):
                read_sms(driver(), places.gpu, places)
            more = sum(fake.live().values()) - sum(before.values())
            assert more == (name in ("cuMemFree", "cuLibraryUnload")), name
            if name == "cuStreamSynchronize":  # then nobody can know whether the kernel still runs
                assert "not drained" in fake.take_misuse()[0]
            before = fake.live()
    fake.excuse_live()  # the two that could not be given back
