"""Disturbed repeats are told from the machine's own noise: injected series, and a made-up /proc."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from toy_sweep import device, sim_lanes, thread_lanes

from smpart.partition import Device
from smpart.profiler.disturbance import Anchors, disturbed, spread
from smpart.profiler.witness import GpuWitness, HostWitness, NoWitness, witness_of

TICK = 1 / os.sysconf("SC_CLK_TCK")


@pytest.mark.parametrize("noise", [0.002, 0.02, 0.1])
def test_injected_disturbances_are_found_and_hardly_anything_else(noise: float) -> None:
    random = np.random.default_rng(1)
    found = missed = alarms = sound = 0
    for _ in range(300):
        seconds = 0.1 * np.exp(noise * random.standard_normal(10))
        hit = random.permutation(10) < random.integers(0, 4)
        seconds[hit] *= np.exp(12 * max(noise, 0.02)) * random.uniform(1.0, 4.0, hit.sum())
        said = disturbed(seconds.tolist(), noise)
        found, missed = found + (said & hit).sum(), missed + (~said & hit).sum()
        alarms, sound = alarms + (said & ~hit).sum(), sound + (~hit).sum()
    assert found / (found + missed) > 0.97
    assert alarms / sound < 0.005


@given(st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=20), st.floats(0, 1))
def test_the_faster_half_is_always_kept(seconds: list[float], noise: float) -> None:
    said = disturbed(seconds, noise)
    assert not said[np.array(seconds) <= np.median(seconds)].any()
    assert disturbed([s * 3 for s in seconds], noise).tolist() == said.tolist()


def test_the_spread_is_that_of_a_normal_distribution() -> None:
    logs = 0.05 * np.random.default_rng(0).standard_normal(20_000)
    assert spread(np.exp(logs).tolist()) == pytest.approx(0.05, rel=0.03)


def test_a_round_is_off_when_its_anchor_is() -> None:
    random, anchors = np.random.default_rng(2), Anchors()
    assert anchors.noise == 0.0 and not anchors.off("prefill", 1.0)
    for _ in range(40):
        anchors.learn("prefill", float(np.exp(0.03 * random.standard_normal())))
    assert anchors.noise == pytest.approx(0.03, rel=0.5)
    assert anchors.off("prefill", 1.3) and not anchors.off("prefill", 1.05) and not anchors.off("decode", 1.3)
    for _ in range(40):  # the machine is slower from now on: that is no disturbance
        anchors.learn("prefill", 1.5)
    assert not anchors.off("prefill", 1.5)


class Proc:
    """A /proc with two CPUs and one worker, that counts as it is told."""

    def __init__(self, root: Path) -> None:
        self.root, self.time = root, 0.0
        self.busy, self.stolen, self.own, self.stalled = [0.0, 0.0, 0.0], [0.0, 0.0, 0.0], 0.0, 0.0
        for folder in ("proc/7", f"proc/{os.getpid()}", "sys/fs/cgroup"):
            (root / folder).mkdir(parents=True)
        self.pass_time(0.0)

    def pass_time(
        self, seconds: float, own: float = 0.0, others: float = 0.0, stolen: float = 0.0, stalled: float = 0.0
    ) -> None:
        self.time += seconds
        self.own += own
        self.busy[0] += own + others
        self.busy[2] += seconds  # a CPU that is not ours is always busy
        self.stolen[1] += stolen
        self.stalled += stalled
        lines = [
            f"cpu{i} {round(busy / TICK)} 0 0 99 0 0 0 {round(stolen / TICK)} 0 0"
            for i, (busy, stolen) in enumerate(zip(self.busy, self.stolen, strict=True))
        ]
        (self.root / "proc/stat").write_text("\n".join(["cpu  9 9 9 9 9 9 9 9 9 9", *lines, "intr 5", ""]))
        stat = f"7 (a) b (c)) S 1 1 1 0 -1 0 0 0 0 0 {round(self.own / TICK)} 0 0 0 20 0"
        (self.root / "proc/7/stat").write_text(stat)
        (self.root / f"proc/{os.getpid()}/stat").write_text("8 (main) S 1 1 1 0 -1 0 0 0 0 0 5 5 0 0 20 0")
        pressure = f"some avg10=0.00 avg60=0.00 avg300=0.00 total={round(self.stalled * 1e6)}\nfull avg10=0 total=0\n"
        (self.root / "sys/fs/cgroup/cpu.pressure").write_text(pressure)

    def witness(self) -> HostWitness:
        return HostWitness(frozenset({0, 1}), lambda: [7, 99_999_999], self.root, lambda: self.time)


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ({"own": 3.9}, None),
        ({"own": 2.0, "others": 0.3}, None),
        ({"own": 2.0, "others": 1.0}, "others used 25% of the CPUs"),
        ({"own": 2.0, "stolen": 0.4}, "the hypervisor took 10% of the CPUs"),
        ({"own": 2.0, "stalled": 0.5}, "the lanes waited for a CPU 25% of the time"),
    ],
)
def test_what_the_kernel_counts_is_evidence(tmp_path: Path, what: dict[str, float], said: str | None) -> None:
    proc = Proc(tmp_path)
    witness = proc.witness()
    mark = witness.mark()
    proc.pass_time(2.0, **what)
    assert witness.objection(mark) == said


def test_too_short_a_time_or_no_proc_is_no_evidence(tmp_path: Path) -> None:
    proc = Proc(tmp_path)
    witness = proc.witness()
    mark = witness.mark()
    proc.pass_time(0.1, others=0.2)
    assert witness.objection(mark) is None
    nowhere = HostWitness(frozenset({0}), lambda: [1], tmp_path / "nowhere")
    assert nowhere.objection(nowhere.mark()._replace(moment=0.0)) is None


def test_who_watches_depends_on_the_device() -> None:
    lanes = thread_lanes()
    lanes.close()
    assert isinstance(witness_of(lanes), NoWitness) and isinstance(witness_of(sim_lanes()), NoWitness)
    lanes.device = Device("gpu", "cuda", 4, (0, 1, 2, 3), 1, {"uuid": "GPU-none"})
    witness = witness_of(lanes)
    assert isinstance(witness, GpuWitness) and witness.objection(witness.mark()) is None
    assert device().kind == "sim"


def test_the_lanes_own_processes_are_counted_on_this_machine() -> None:
    class Pids:
        device = Device("cpu", "cpu", 1, (0,), 1, {"allowed_cpus": sorted(os.sched_getaffinity(0))})

        def pids(self) -> tuple[int, ...]:
            return (os.getppid(),)

    witness = witness_of(Pids())  # type: ignore[arg-type]
    assert isinstance(witness, HostWitness) and witness.cpus == frozenset(os.sched_getaffinity(0))
    before = witness.mark()
    spin = sum(i * i for i in range(300_000))
    after = witness.mark()
    assert spin and after.own >= before.own and after.moment > before.moment
