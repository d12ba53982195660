"""Law 3 on real lanes: greedy output equals plain `generate`, whatever the policy does and whoever dies."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from chaos import Chaos, prompts

from smpart.engine import Deployment
from smpart.engine.request import FinishReason, Request
from smpart.kvcache import KVConfig
from smpart.partition import Side
from smpart.runtime.models import load_model
from smpart.runtime.sampling import SamplingParams
from smpart.scheduler.plan import Piece, Plan, ResumePrefill, StartPrefill, Step
from smpart.scheduler.slo import SLO
from smpart.scheduler.snapshot import Snapshot

NEW = 12


def reference(model, prompt: list[int], tokens: int) -> list[int]:
    model.generation_config.eos_token_id = None  # as an argument, None would be filled in again from here
    with torch.inference_mode():
        answer = model.generate(torch.tensor([prompt]), max_new_tokens=tokens, do_sample=False, pad_token_id=0)
    return answer[0, len(prompt) :].tolist()


@pytest.fixture(scope="module")
def tiny():
    model, _ = load_model("random:llama")
    with Deployment.serve(model, backend="cores", kv=KVConfig(blocks=40, max_len=256, max_requests=8)) as deployment:
        yield model, deployment


def run(deployment, model, seed: int, *, kills: int = 0, cancels: float = 0.2, count: int = 10) -> None:
    rng = np.random.default_rng(seed)
    core = deployment.core(Chaos(seed), SLO(), seed=seed)
    requests = [
        Request(i, p, SamplingParams(max_tokens=int(rng.integers(2, NEW)), ignore_eos=True), SLO())
        for i, p in enumerate(prompts(rng, count, 150))
    ]
    cancelled: set[int] = set()
    deaths = rng.choice(np.arange(3, 15), kills, replace=False).tolist()  # after so many tokens: work is left
    for request in requests:
        core.add(request)
        if rng.random() < cancels:
            victim = requests[int(rng.integers(0, request.id + 1))]
            if not victim.finished:
                cancelled.add(victim.id)
                core.cancel(victim)
        core.turn()
    while not core.idle:
        core.turn()
        said = sum(len(request.token_ids) for request in requests)
        if deaths and said >= min(deaths):
            deaths.remove(min(deaths))
            side = Side.PREFILL if rng.random() < 0.5 else Side.DECODE
            with contextlib.suppress(ProcessLookupError):
                os.kill(deployment.lanes.pid(side), signal.SIGKILL)
    assert not deaths
    for request in requests:
        if request.id not in cancelled:
            assert request.finish_reason is FinishReason.LENGTH, request.error
            assert request.token_ids == reference(model, list(request.prompt), request.params.max_tokens)
    core.state.pool.check()
    assert core.state.pool.owned == 0
    assert len(core.state.table) == 0


@pytest.mark.parametrize("seed", range(4))
def test_any_schedule_gives_the_tokens_of_generate(tiny, seed: int) -> None:
    model, deployment = tiny
    run(deployment, model, seed)


@pytest.mark.parametrize("seed", range(3))
def test_killed_workers_cost_time_and_no_token(tiny, seed: int) -> None:
    model, deployment = tiny
    run(deployment, model, 100 + seed, kills=1, cancels=0.0)


class LayerByLayer(Chaos):
    """One prompt at a time, a layer at a time, and a lane that is idle between two of them."""

    def plan(self, s: Snapshot) -> Plan:
        if s.prefill_lane.inflight:
            return Plan(s.splits[-1])
        if s.forwards:
            return Plan(s.splits[-1], prefill=ResumePrefill(s.forwards[0].id, 1))
        for row in (*s.waiting.tolist(), *s.prefilling.tolist()):
            return Plan(s.splits[-1], prefill=StartPrefill((Piece(row, int(s.table.known[row])),), 1))
        return Plan(s.splits[0], step=Step(tuple(s.running.tolist())))


def test_a_worker_that_is_killed_with_nothing_but_a_paused_forward_costs_no_token(tiny) -> None:
    """No work comes back as lost then: the engine must find out by itself that the forward is gone."""
    model, deployment = tiny
    lanes = deployment.lanes
    core = deployment.core(LayerByLayer(1), SLO())
    request = Request(0, list(range(3, 60)), SamplingParams(max_tokens=4, ignore_eos=True), SLO())
    core.add(request)
    core.turn()
    (paused,) = core.state.forwards.values()
    completions = lanes.wait(None)
    victim = lanes.pid(Side.PREFILL)
    os.kill(victim, signal.SIGKILL)
    while lanes.pid(Side.PREFILL) == victim:
        completions += lanes.wait(lanes.now() + 0.01)
    core._digest.take(completions)
    assert paused.inflight == 0 and paused.layers_left
    core.turn(core.now())
    assert paused.id not in core.state.forwards
    while not core.idle:
        core.turn()
    assert request.error is None
    assert request.token_ids == reference(model, list(request.prompt), 4)
    assert core.log.lost_works == 0


@pytest.mark.parametrize("policy", ["mixed", "chunked:48", "static:1/1", "smpart", "overlap"])
def test_every_policy_gives_the_tokens_of_generate(tiny, policy: str) -> None:
    model, deployment = tiny
    if policy.startswith("static") and len(deployment.lanes.splits()) < 3:
        pytest.skip("one usable core: nothing to split")
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


def test_the_hand_over_from_prefill_to_decode_copies_nothing(tiny) -> None:
    """The KV that decode reads lies where prefill wrote it: same segment, same offsets, no other KV memory exists."""
    _, deployment = tiny
    core = deployment.core(Chaos(5, preempt=0, abandon=0), SLO())
    request = Request(0, list(range(3, 100)), SamplingParams(max_tokens=4, ignore_eos=True), SLO())
    core.add(request)
    blocks_at = {}
    while not core.idle:
        core.turn()
        slot = int(core.state.table.slot[0])
        if slot >= 0:
            blocks_at[len(request.token_ids)] = deployment.board.tables[slot, :6].copy()
    first, *later = blocks_at.values()
    assert all((blocks == first).all() for blocks in later)
    for side in Side:
        maps = Path(f"/proc/{deployment.lanes.pid(side)}/maps").read_text().splitlines()
        kv = [line for line in maps if "smpart-kv" in line]
        assert kv and all(line.split()[1].endswith("s") for line in kv), "each worker maps the one shared KV memory"
