"""A model served under MPS: a holder and workers in processes of their own, over a fake driver and a fake daemon."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import fake_clients
import fake_mps
import pytest
from chaos import Chaos
from fake_cuda import Fake
from fake_mps import FakeMps
from test_same_tokens import reference, run

from smpart.engine import Deployment
from smpart.engine.real import deploy_real, warm_up
from smpart.engine.request import Request
from smpart.engine.staff import on_mps
from smpart.errors import SmpartError, UsageError
from smpart.kvcache import KVConfig
from smpart.partition import Side, Split
from smpart.partition.cuda.mps_shares import Mode
from smpart.partition.mps import Mps
from smpart.profiler.timer import Timer
from smpart.profiler.works import Works
from smpart.runtime.children import Zygote
from smpart.runtime.models import load_model
from smpart.runtime.processes import ProcessLanes
from smpart.runtime.sampling import SamplingParams
from smpart.scheduler.slo import SLO

pytestmark = pytest.mark.drivers("13.0")

SPLITS = (Split(40, 92), Split(96, 36))
WHOLE = (Split(0, 132), Split(132, 0))


@pytest.fixture(scope="module")
def daemons(driver: Fake) -> Iterator[FakeMps]:
    """Workers do not carry the program's variables: they are forked from a process that was started before."""
    warm_up()
    driver.reset()
    with fake_mps.playing() as fake, pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", str(fake.base))
        patch.setattr("smpart.engine.real._LOOK_S", 0.1)  # what forwards take is of no interest here
        fake.script(uuid=Mps().device().facts["uuid"])
        yield fake
    fake_clients.reports(Zygote.shared().pid)


@pytest.fixture(scope="module")
def model() -> Any:
    return load_model("random:llama")[0]


def deploy(
    model: Any,
    daemons: FakeMps,
    glue: str = "open_glue",
    mode: Mode = Mode.PERCENTAGE,
    kv: KVConfig | None = None,
    splits: Sequence[Split] | None = SPLITS[:1],
    split: Split | None = None,
) -> Deployment:
    kv = kv or KVConfig(max_len=256, blocks=40, max_requests=8)
    hire = partial(on_mps, splits=splits, glue=f"fake_clients:{glue}")
    return deploy_real(model, None, Mps(mode, split=split, program=daemons.program), kv, name="llama", hire=hire)


@pytest.fixture(scope="module")
def served(model: Any, daemons: FakeMps) -> Iterator[Deployment]:
    with deploy(model, daemons, splits=SPLITS) as deployment:
        yield deployment


def lanes_of(deployment: Deployment) -> ProcessLanes:
    assert isinstance(deployment.lanes, ProcessLanes)
    return deployment.lanes


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_any_schedule_gives_the_tokens_of_generate(served: Deployment, model: Any, seed: int) -> None:
    run(served, model, seed)


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_killed_worker_costs_time_and_no_token(served: Deployment, model: Any, seed: int) -> None:
    """Its KV memory is the holder's: nothing that was computed before is lost."""
    epoch = served.lanes.epoch
    run(served, model, 100 + seed, kills=1, cancels=0.0)
    assert served.lanes.epoch == epoch


def test_a_killed_holder_costs_time_and_no_token(
    served: Deployment, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All memory dies with it: every process is another one, every request starts again."""
    lanes = lanes_of(served)
    before, epoch = lanes.pids(), lanes.epoch
    monkeypatch.setattr(lanes, "pid", lambda side: lanes.pids()[0])
    run(served, model, 200, kills=1, cancels=0.0)
    assert lanes.epoch == epoch + 1
    assert not {*before} & {*lanes.pids()}


@pytest.mark.slow
def test_workers_killed_while_idle_are_told_again_what_they_need(served: Deployment, model: Any) -> None:
    lanes, prompt = lanes_of(served), list(range(3, 90))
    core = served.core(Chaos(3, preempt=0, abandon=0), SLO())
    for number in range(2):
        request = Request(number, prompt, SamplingParams(max_tokens=4, ignore_eos=True), SLO())
        core.add(request)
        while not core.idle:
            core.turn()
        assert request.token_ids == reference(model, prompt, 4)
        holder, *workers = lanes.pids()
        for pid in workers:
            os.kill(pid, signal.SIGKILL)
        while {*workers} & {*lanes.pids()}:
            core.turn(core.now() + 0.01)
        assert lanes.pids()[0] == holder


def test_there_is_one_worker_a_share_and_each_has_its_own(served: Deployment) -> None:
    lanes = lanes_of(served)
    assert lanes.splits() == tuple(sorted((*SPLITS, *WHOLE)))
    assert len({*lanes.pids()}) == 1 + 2 * 3
    # Caps that add up to no more than the device may run together, whatever SMs they land on.
    assert lanes.disjoint(SPLITS[0], SPLITS[1]) and not lanes.disjoint(SPLITS[1], SPLITS[0])
    works = Works(served.board, served.blocks, served.kv.block_tokens)
    timer = Timer(lanes, works)
    for split in (SPLITS[1], WHOLE[0]):
        timer.one(works.decode(split, 1, 8))
        assert lanes.realised(Side.DECODE) == set(range(132 - split.decode, 132))
    pid = lanes.pid(Side.PREFILL)
    timer.one(works.prefill(SPLITS[0], ((8, 0),)))
    assert lanes.realised(Side.PREFILL) == set(range(40)) and lanes.pid(Side.PREFILL) in lanes.pids()
    timer.one(works.prefill(SPLITS[1], ((8, 0),)))
    assert lanes.pid(Side.PREFILL) != pid or pid in lanes.pids()


@pytest.mark.slow
def test_affinity_and_memory_by_descriptor_where_ipc_cannot_and_nothing_is_left(model: Any, daemons: FakeMps) -> None:
    zygote = Zygote.shared().pid
    fake_clients.reports(zygote)
    with deploy(model, daemons, "open_without_ipc", Mode.AFFINITY) as deployment:
        run(deployment, model, 1, count=5)
        pids = lanes_of(deployment).pids()
    assert fake_clients.reports(zygote) == ["[] {}"] * len(pids)
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


@pytest.mark.slow
def test_a_fault_on_the_device_costs_time_and_no_token(model: Any, daemons: FakeMps) -> None:
    """It takes all clients along: memory is lost as if the holder had died. A busy worker is ended through MPS."""
    with deploy(model, daemons, "open_faulty") as deployment:
        lanes, prompt = lanes_of(deployment), list(range(3, 90))
        before = lanes.pids()
        core = deployment.core(Chaos(3, preempt=0, abandon=0), SLO())
        request = Request(1, prompt, SamplingParams(max_tokens=6, ignore_eos=True), SLO())
        core.add(request)
        while not request.token_ids:
            core.turn()
        fake_clients.FAULT.touch()
        while not core.idle:
            core.turn()
        assert request.token_ids == reference(model, prompt, 6)
        assert lanes.epoch == 1 and not {*before} & {*lanes.pids()}

        works = Works(deployment.board, deployment.blocks, deployment.kv.block_tokens)
        lanes.launch(works.prefill(SPLITS[0], ((200, 0),)))
        pid = lanes.pid(Side.PREFILL)
        daemons.script(clients=[{"pid": pid}])
    daemons.mend()
    assert [said for said in daemons.log("command") if said.startswith("terminate_client") and said.endswith(f" {pid}")]


@pytest.mark.slow
@pytest.mark.drivers("13.1")
def test_static_partitions_serve_one_split_and_the_exclusive_ones(model: Any, daemons: FakeMps) -> None:
    with deploy(model, daemons, mode=Mode.PARTITION, splits=None, split=Split(96, 32)) as deployment:
        lanes = lanes_of(deployment)
        assert list(map(str, lanes.splits())) == ["0/128", "96/32", "128/0"]
        assert lanes.disjoint(Split(96, 32), Split(96, 32))
        assert not lanes.disjoint(Split(128, 0), Split(96, 32))
        run(deployment, model, 3, count=5)
    with pytest.raises(UsageError, match="static partitions serve one split, not 2"):
        deploy(model, daemons, mode=Mode.PARTITION, splits=[Split(96, 32), Split(64, 64)])


@pytest.mark.parametrize(
    ("glue", "why"),
    [
        ("open_none", r"the holder of the device's memory cannot start: RuntimeError: no device today"),
        ("open_unlimited", r"the \w+ worker of \d+ SMs cannot start: .* has them all: MPS ignored its share\..*"),
    ],
)
def test_what_cannot_serve_is_one_line(model: Any, daemons: FakeMps, glue: str, why: str) -> None:
    with pytest.raises(SmpartError, match=rf"^{why}$"):
        deploy(model, daemons, glue)


def test_kv_memory_that_does_not_fit(model: Any, daemons: FakeMps) -> None:
    with pytest.raises(SmpartError, match=r"^the holder of .* KV memory of .* takes .* this process may use .* MiB"):
        deploy(model, daemons, kv=KVConfig(max_len=256, memory_bytes=200 << 30))
