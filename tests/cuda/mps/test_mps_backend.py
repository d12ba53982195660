"""The backend: what it says of a device, its daemon, its workers' environments, its static partitions."""

import re
from types import SimpleNamespace

import pytest

from smpart.errors import BackendUnavailable, UsageError
from smpart.partition import Backend, Side, Split, backends, mps, open_backend, registry
from smpart.partition.cuda import mps_daemon
from smpart.partition.cuda.gpu import Gpu
from smpart.partition.cuda.mps_control import Control
from smpart.partition.cuda.mps_shares import CLIENTS_PER_DEVICE, Mode, Seen
from smpart.partition.mps import Mps

UUID = "GPU-74d43ed3-cdf7-e667-3644-bf5b4f46ed65"
H200 = Gpu(0, "NVIDIA H200", UUID, 132, 8, 8, (9, 0), 141 << 30)
A100 = Gpu(0, "NVIDIA A100", UUID, 108, 4, 2, (8, 0), 80 << 30)


class Api:
    """As much of a driver as the backend asks."""

    def __init__(self, version=(13, 1), compute_mode=0):
        self.version = version
        self.compute_mode = compute_mode
        self.api = SimpleNamespace(CUdevice_attribute=SimpleNamespace(CU_DEVICE_ATTRIBUTE_COMPUTE_MODE="compute mode"))

    def __call__(self, name, attribute, device):
        assert (name, attribute, device) == ("cuDeviceGetAttribute", "compute mode", 0)
        return self.compute_mode


@pytest.fixture
def backend(fake_mps, monkeypatch):
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(fake_mps.base / "theirs"))
    monkeypatch.setattr(mps_daemon, "_bases", lambda: (fake_mps.base,))

    def make(mode=Mode.PERCENTAGE, gpu=H200, program=fake_mps.program, foreign=False, **api):
        it = Api(**api)
        return Mps(mode, foreign=foreign, api=lambda: it, find=lambda _: gpu, program=program)

    return make


@pytest.fixture
def theirs(fake_mps):
    """A daemon that somebody else started."""
    pipe = fake_mps.base / "theirs"
    pipe.mkdir()
    control = Control(pipe, pipe, program=fake_mps.program, timeout_s=20)
    control.launch(UUID)
    yield control
    control.quit(1)


@pytest.mark.parametrize("name", ["mps", "mps:affinity", "mps:partition", "mps:foreign"])
def test_it_opens_by_name(name):
    backend = open_backend(name)
    assert isinstance(backend, Backend) and backend.name == name


def test_static_partitions_may_be_told_their_split():
    backend = open_backend("mps:partition:96/32")
    assert isinstance(backend, Mps) and (backend.mode, backend.split) == (Mode.PARTITION, Split(96, 32))


def test_auto_prefers_green_to_it_and_it_to_cores():
    backends()  # loads them all
    ranks = [registry._ENTRIES[name].rank for name in ("cores", "mps", "green")]
    assert ranks == sorted(ranks) and len(set(ranks)) == 3


def test_other_names_are_refused():
    for name in ("mps:half", "mps:partition:9", "mps:foreign:96/32"):
        with pytest.raises(UsageError, match="mps:affinity, mps:partition, mps:partition:P/D, mps:foreign"):
            open_backend(name)
    with pytest.raises(
        UsageError, match=r"^a foreign MPS daemon is not configured, so it gets no static partitions: use"
    ):
        Mps(Mode.PARTITION, foreign=True)


@pytest.mark.parametrize("mode", [Mode.PERCENTAGE, Mode.AFFINITY])
def test_caps_split_the_whole_device_and_admit_that_lanes_may_meet(backend, mode):
    it = backend(mode)
    device, splits = it.device(), it.splits()
    assert (device.name, device.kind, device.units, device.memory_bytes) == ("NVIDIA H200", "cuda", 132, 141 << 30)
    assert splits[0] == Split(0, 132) and splits[-1] == Split(132, 0) and Split(96, 36) in splits
    assert device.facts["disjoint"] is False and "may meet" in str(device.facts["guarantee"])
    assert device.facts["mode"] == mode and device.facts["compute_mode"] == "default"
    assert "unused_sms" not in device.facts
    assert not any(it.disjoint(split, split) for split in splits)
    assert it.why_unusable() is None


@pytest.mark.parametrize(
    ("code", "word"), [(0, "default"), (2, "prohibited"), (3, "exclusive process"), (7, "unknown")]
)
def test_what_it_tells_of_the_device(backend, code, word):
    it = backend(compute_mode=code)
    assert it.device().facts == H200.device(SimpleNamespace(version=(13, 1))).facts | {
        "mode": "percentage",
        "disjoint": False,
        "guarantee": Mode.PERCENTAGE.guarantee,
        "resize": Mode.PERCENTAGE.resize,
        "clients_per_device": CLIENTS_PER_DEVICE,
        "compute_mode": word,
        "daemon": "our own, started at need",
    }


def test_partitions_are_disjoint_within_one_split_only(backend):
    it = backend(Mode.PARTITION)
    device, splits = it.device(), it.splits()
    assert device.units == 128 and len(device.unit_ids) == 128 and device.facts["unused_sms"] == 4
    assert device.facts["disjoint"] is True and splits[0] == Split(0, 128)
    assert it.disjoint(Split(96, 32), Split(96, 32))
    assert not it.disjoint(Split(96, 32), Split(64, 64)) and not it.disjoint(Split(128, 0), Split(128, 0))


def test_every_split_of_every_device_fits_one_pool_of_caps(backend):
    for gpu in (H200, A100):
        it = backend(gpu=gpu)
        assert it.pool(it.splits()).shares == it.shares()


def test_a_pool_is_sixteen_workers_or_what_it_is_told(backend):
    it = backend()
    assert it.pool().workers == 16
    assert it.pool([Split(96, 36)]).workers == 2
    with pytest.raises(UsageError, match=r"split 1/131: mps makes 0/132, 8/124, \.\.\., 132/0"):
        it.pool([Split(1, 131)])
    with pytest.raises(UsageError, match="splits at once cannot be had"):
        backend(Mode.PARTITION).pool()


def test_its_daemon_lives_from_start_to_stop(fake_mps, backend):
    it = backend()
    assert fake_mps.homes() == []
    with pytest.raises(BackendUnavailable, match="was not started"):
        it.worker_environment(Side.DECODE, Split(96, 36))
    with it:
        it.start()
        (home,) = fake_mps.homes()
        base = {
            "PATH": "/bin",
            "CUDA_MPS_SM_PARTITION": "old",
            "CUDA_VISIBLE_DEVICES": "3",
            "CUDA_MPS_PIPE_DIRECTORY": "x",
        }
        common = {"PATH": "/bin", "CUDA_VISIBLE_DEVICES": UUID, "CUDA_MPS_PIPE_DIRECTORY": str(home / "pipe")}
        assert it.worker_environment(Side.DECODE, Split(96, 36), base) == common | {
            "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "28"
        }
        assert it.worker_environment(Side.PREFILL, Split(132, 0), base)["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "100"
        assert it.holder_environment(base) == common
        with pytest.raises(UsageError, match="split 132/0 has no decode worker in mps"):
            it.worker_environment(Side.DECODE, Split(132, 0))
        with pytest.raises(UsageError, match="split 1/131 has no"):
            it.worker_environment(Side.DECODE, Split(1, 131))
        with pytest.raises(UsageError, match="no partitions to arrange"):
            it.arrange(Split(96, 36))
    it.stop()
    assert fake_mps.homes() == [] and fake_mps.processes() == []


def test_a_worker_is_terminated_by_its_server(fake_mps, backend):
    with backend() as it:
        fake_mps.script(clients=[{"pid": 41}, {"pid": 42}])
        it.terminate(42)
        it.terminate(43)  # not a client
        (server,) = it._daemon.control.servers()
        assert [line for line in fake_mps.log("command") if line.startswith("terminate")] == [
            f"terminate_client {server} 42"
        ]
        fake_mps.fault("terminate_client", reply="CUDA_ERROR_MPS_RPC_FAILURE", status=0)
        with pytest.raises(BackendUnavailable, match="the client lost its MPS server"):
            it.terminate(41)
        fake_mps.mend()


def test_a_daemon_that_does_not_start_leaves_it_stopped(fake_mps, backend):
    fake_mps.fault("-d", reply="Cannot bind")
    it = backend()
    with pytest.raises(BackendUnavailable, match="Cannot bind"):
        it.start()
    with pytest.raises(BackendUnavailable, match="was not started"):
        it.holder_environment()


def test_what_a_worker_read_back_is_checked_against_its_share(backend):
    it = backend()
    assert it.check(Seen(True, 36), Side.DECODE, Split(96, 36)) == 36
    with pytest.raises(BackendUnavailable, match="ignored its share"):
        it.check(Seen(True, 132), Side.DECODE, Split(96, 36))


@pytest.mark.parametrize(
    ("mode", "seen", "affinity"), [(Mode.PERCENTAGE, Seen(True, 36), None), (Mode.AFFINITY, Seen(True, 132, 36), 36)]
)
def test_a_share_is_asked_for_in_a_process_of_its_own(fake_mps, backend, monkeypatch, mode, seen, affinity):
    asked = []
    monkeypatch.setattr(mps, "read_back", lambda environment, sms: asked.append((environment, sms)) or seen)
    with backend(mode) as it:
        assert it.realise(Side.DECODE, Split(96, 36)) == 36
        assert asked == [(it.worker_environment(Side.DECODE, Split(96, 36)), affinity)]
        with pytest.raises(BackendUnavailable, match="prefill worker asked for 96 of 132 SMs and has 36"):
            it.realise(Side.PREFILL, Split(96, 36))


def test_partitions_are_made_read_back_and_made_anew(fake_mps, backend):
    fake_mps.script(wrap=True)
    with backend(Mode.PARTITION) as it:
        assert fake_mps.log("launch") == [["-d", "-S"]]
        with pytest.raises(UsageError, match="arrange it first"):
            it.worker_environment(Side.DECODE, Split(96, 32))
        it.arrange(Split(96, 32))
        one, other = (it.worker_environment(side, Split(96, 32), {}) for side in Side)
        assert one["CUDA_MPS_SM_PARTITION"] != other["CUDA_MPS_SM_PARTITION"]
        assert "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE" not in one
        assert it.holder_environment({})["CUDA_MPS_PIPE_DIRECTORY"].endswith("/pipe/nobody")
        assert added(fake_mps) == ["12", "4"]
        it.arrange(Split(0, 128))  # the old two must go first, or there is no room
        assert added(fake_mps) == ["12", "4", "16"]
        assert it.worker_environment(Side.DECODE, Split(0, 128), {})["CUDA_MPS_SM_PARTITION"].startswith(f"{UUID}/")
        with pytest.raises(UsageError, match="arrange it first"):
            it.worker_environment(Side.DECODE, Split(96, 32))
        with pytest.raises(UsageError, match="mps:partition makes"):
            it.arrange(Split(96, 36))
        it.stop()
        it.start()  # another daemon, which has no partitions yet
        with pytest.raises(UsageError, match="arrange it first"):
            it.worker_environment(Side.DECODE, Split(0, 128))


def added(fake_mps):
    return [line.split()[-1] for line in fake_mps.log("command") if line.startswith("sm_partition add")]


def test_partitions_that_fail_leave_none(fake_mps, backend):
    fake_mps.script(sms=96)  # twelve chunks
    with backend(Mode.PARTITION) as it:
        control = it._daemon.control
        with pytest.raises(BackendUnavailable, match=r"sm_partition add .* 4` .*too few chunks are free"):
            it.arrange(Split(96, 32))
        assert control.partitions() == ()
        fake_mps.script(chunk=4, sms=132)  # a device with smaller chunks than this capability should have
        with pytest.raises(BackendUnavailable, match="prefill partition should have 64 SMs, and lspart says 32"):
            it.arrange(Split(64, 64))
        assert control.partitions() == ()
        fake_mps.script(chunk=8)
        it.arrange(Split(64, 64))
        (first, _) = control.partitions()
        full = it.worker_environment(Side.PREFILL, Split(64, 64))["CUDA_MPS_SM_PARTITION"].partition("/")[2]
        assert full.startswith(first.name)
        fake_mps.script(clients=[{"pid": 7, "partition": full}])
        with pytest.raises(BackendUnavailable, match=r"Failed to remove partition .*in use"):
            it.arrange(Split(96, 32))
        assert control.partitions()[0].in_use is True
        assert it.worker_environment(Side.PREFILL, Split(64, 64))["CUDA_MPS_SM_PARTITION"].endswith(full)
        fake_mps.mend()
        fake_mps.script(sms=56)  # seven chunks
        with pytest.raises(BackendUnavailable, match="too few chunks are free"):
            it.arrange(Split(96, 32))
        for side in Side:  # those of the split before are gone, and known to be
            with pytest.raises(UsageError, match="arrange it first"):
                it.worker_environment(side, Split(64, 64))
        fake_mps.mend()


def test_what_went_wrong_first_is_told(fake_mps, backend, monkeypatch):
    def refuse(*_):
        raise BackendUnavailable("not removed either")

    with backend(Mode.PARTITION) as it:
        fake_mps.script(sms=96)
        monkeypatch.setattr(Control, "remove_partition", refuse)
        with pytest.raises(BackendUnavailable, match="too few chunks are free"):
            it.arrange(Split(96, 32))


def test_a_partition_that_is_not_listed_is_refused(fake_mps, backend):
    with backend(Mode.PARTITION) as it:
        fake_mps.fault("lspart", reply="GPU Partition free used free used clients", status=0)
        with pytest.raises(BackendUnavailable, match="lspart says it is not there"):
            it.arrange(Split(96, 32))
        fake_mps.mend()


def test_a_foreign_daemon_is_used_only_when_told_and_outlives_us(fake_mps, backend, theirs):
    it = backend(foreign=True)
    assert it.why_unusable() is None and it.device().facts["daemon"] == f"foreign, {theirs.pipe}"
    with it:
        environment = it.worker_environment(Side.DECODE, Split(96, 36), {})
        assert environment["CUDA_MPS_PIPE_DIRECTORY"] == str(theirs.pipe)
        assert fake_mps.homes() == []
    assert mps_daemon.is_live(theirs.pipe)
    assert backend().why_unusable() is None  # both daemons may have the device
    with backend() as ours:
        assert ours.worker_environment(Side.DECODE, Split(96, 36), {})["CUDA_MPS_PIPE_DIRECTORY"] != str(theirs.pipe)
    assert mps_daemon.is_live(theirs.pipe)
    assert "may have it: use that one with mps:foreign" in backend(compute_mode=3).why_unusable()
    assert backend(compute_mode=3, foreign=True).why_unusable() is None


VOLTA = Gpu(0, "NVIDIA V100", UUID, 80, 2, 2, (7, 0), 32 << 30)
PASCAL = Gpu(0, "NVIDIA P100", UUID, 56, 2, 2, (6, 0), 16 << 30)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"gpu": PASCAL}, "P100: shares under MPS need a Volta GPU"),
        ({"gpu": VOLTA, "mode": Mode.PARTITION}, "V100: static partitions need an Ampere GPU"),
        (
            {"mode": Mode.PARTITION, "version": (13, 0)},
            "mps:partition needs a driver of CUDA 13.1 or later; this one is of 13.0: update it, or use mps",
        ),
        ({"mode": Mode.AFFINITY, "version": (12, 4)}, "mps:affinity needs a driver of CUDA 12.5"),
        ({"compute_mode": 3, "mode": Mode.PARTITION}, "EXCLUSIVE_PROCESS, where the holder of the memory"),
        ({"version": (10, 2)}, "mps needs a driver of CUDA 11.0 or later; this one is of 10.2"),
        ({"compute_mode": 2}, "PROHIBITED: as root, nvidia-smi -c DEFAULT"),
        ({"program": "no-such-program"}, "no-such-program is not on PATH"),
        ({"foreign": True}, "no MPS daemon runs in .*theirs: start one there"),
    ],
)
def test_it_says_what_is_missing(backend, options, words):
    why = backend(**options).why_unusable()
    assert why is not None and re.search(words, why)


@pytest.mark.parametrize(
    "options",
    [
        {"gpu": VOLTA},
        {"gpu": A100, "mode": Mode.PARTITION},
        {"version": (12, 4)},
        {"mode": Mode.AFFINITY, "version": (12, 5)},
        {"compute_mode": 3},
        {"mode": Mode.PARTITION},
    ],
)
def test_it_says_when_nothing_is(backend, options):
    assert backend(**options).why_unusable() is None


def test_limits_of_this_process_would_hide_the_device(backend, monkeypatch):
    monkeypatch.setenv("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", "0=1G")
    assert backend().why_unusable() is None  # that hides no part of it
    monkeypatch.setenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "50")
    assert "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE is set for this process" in backend().why_unusable()


def test_a_driver_that_fails_is_told_and_not_raised(backend):
    def fail(_):
        raise BackendUnavailable("the driver is gone")

    assert Mps(api=Api, find=fail).why_unusable() == "the driver is gone"


def test_without_a_driver_it_says_so(monkeypatch):
    monkeypatch.setattr(mps, "why_no_driver", lambda: "no NVIDIA driver is installed here")
    assert Mps().why_unusable() == "no NVIDIA driver is installed here"
