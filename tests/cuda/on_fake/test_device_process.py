"""A model served by a device's process, with all of it but kernels: a fake driver, and arithmetic on torch's CPU."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
from chaos import Chaos, prompts
from fake_cuda import Fake
from test_same_tokens import reference, run

from smpart.engine import Deployment
from smpart.engine.real import deploy_real
from smpart.engine.request import Request
from smpart.engine.staff import on_gpu
from smpart.errors import SmpartError
from smpart.kvcache import KVConfig
from smpart.partition import Side
from smpart.partition.green import Green
from smpart.profiler.timer import Timer
from smpart.profiler.works import Works
from smpart.runtime.contender import Contender, Pressed
from smpart.runtime.models import load_model
from smpart.runtime.processes import ProcessLanes
from smpart.runtime.sampling import SamplingParams
from smpart.scheduler.slo import SLO

pytestmark = pytest.mark.drivers("13.0")


def deploy(model: Any, kv: KVConfig | None = None, **options: Any) -> Deployment:
    kv = kv or KVConfig(max_len=256, blocks=40, max_requests=8)
    hire = partial(on_gpu, parts="fake_parts:open_parts", **options)
    return deploy_real(model, None, Green(), kv, name="llama", hire=hire)


@pytest.fixture(scope="module")
def served(driver: Fake) -> Iterator[tuple[Any, Deployment]]:
    driver.reset()
    model, _ = load_model("random:llama")
    with deploy(model) as deployment:
        yield model, deployment


def few(*values: Any) -> list[Any]:
    """The first two always, the others only when everything is run: each takes seconds."""
    return [pytest.param(value, marks=[pytest.mark.slow] if at > 1 else []) for at, value in enumerate(values)]


@pytest.mark.parametrize("seed", few(*range(4)))
def test_any_schedule_gives_the_tokens_of_generate(served: Any, seed: int) -> None:
    model, deployment = served
    run(deployment, model, seed)


@pytest.mark.parametrize("seed", range(2))  # a worker that dies five times a minute ends the engine
def test_a_killed_device_process_costs_time_and_no_token(served: Any, seed: int) -> None:
    """Its KV memory dies with it: every request starts again, and finishes with the same tokens."""
    model, deployment = served
    run(deployment, model, 100 + seed, kills=1, cancels=0.0)


@pytest.mark.parametrize("policy", few("static:64/68", "smpart", "mixed", "chunked:48"))
def test_every_policy_gives_the_tokens_of_generate(served: Any, policy: str) -> None:
    model, deployment = served
    rng = np.random.default_rng(7)
    core = deployment.core(policy, SLO(ttft_ms=50, tpot_ms=5))
    requests = [
        Request(i, p, SamplingParams(max_tokens=8, ignore_eos=True), SLO(50, 5))
        for i, p in enumerate(prompts(rng, 8, 200))
    ]
    for request in requests:
        core.add(request)
        core.turn(core.now())
    while not core.idle:
        core.turn()
    for request in requests:
        assert request.token_ids == reference(model, list(request.prompt), 8)


def test_both_lanes_are_one_process_with_all_splits(served: Any) -> None:
    _, deployment = served
    lanes = deployment.lanes
    assert isinstance(lanes, ProcessLanes)
    assert lanes.pid(Side.PREFILL) == lanes.pid(Side.DECODE)
    assert len(lanes.splits()) == 17 and deployment.backend == "green"
    # Nobody has looked at this device's SMs: only sides of one and the same split are known to be apart.
    assert all(lanes.disjoint(p, d) == (p == d and not p.exclusive) for p in lanes.splits() for d in lanes.splits())


def test_a_device_lost_while_idle_loses_the_prefix_cache_too(served: Any) -> None:
    model, deployment = served
    core = deployment.core(Chaos(3, preempt=0, abandon=0), SLO())
    prompt = list(range(3, 90))
    for round_ in range(2):
        request = Request(round_, prompt, SamplingParams(max_tokens=4, ignore_eos=True), SLO())
        core.add(request)
        while not core.idle:
            core.turn()
        assert request.token_ids == reference(model, prompt, 4)
        assert request.cached_tokens == 0
        os.kill(deployment.lanes.pid(Side.DECODE), signal.SIGKILL)
        epoch = deployment.lanes.epoch
        while deployment.lanes.epoch == epoch:
            core.turn(core.now() + 0.01)
        assert core.state.pool.cached == 0


def test_memory_that_is_not_named_is_what_the_device_has(driver: Fake) -> None:
    model, _ = load_model("random:llama")
    with deploy(model, KVConfig(max_len=256, max_requests=8)) as deployment:
        assert deployment.blocks == 8 * 16  # all that 8 requests of 256 tokens can use


def test_a_device_that_cannot_be_opened_is_one_line(driver: Fake) -> None:
    model, _ = load_model("random:llama")
    hire = partial(on_gpu, parts="fake_parts:open_none")
    with pytest.raises(SmpartError, match=r"^the device's worker cannot start: RuntimeError: no device today$"):
        deploy_real(model, None, Green(), KVConfig(max_len=64), name="llama", hire=hire)


def test_kv_memory_that_does_not_fit_the_device(driver: Fake) -> None:
    model, _ = load_model("random:llama")
    for too_much in (KVConfig(max_len=256, memory_bytes=80 << 20), KVConfig(max_len=256, blocks=1 << 16)):
        with pytest.raises(SmpartError, match=r"KV memory of .* takes .* this process may use 64\.0 MiB"):
            deploy(model, too_much)


def test_contenders_come_through_the_channel_as_any_work_does(served: Any) -> None:
    _, deployment = served
    works = Works(deployment.board, deployment.blocks, deployment.kv.block_tokens)
    split = deployment.lanes.splits()[8]
    work = works.foreign(Side.PREFILL, split, Contender("l2", 3))
    (done,) = Timer(deployment.lanes, works).alone(work, 1)
    assert done.result == Pressed(8 * split.prefill * 256 * 3 * 64 * 16, 0.0)
