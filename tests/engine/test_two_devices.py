"""Prefill and decode on two devices: KV crosses a link, each has memory of its own, nothing is lost on the way."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from chaos import Constant, prompts
from hypothesis import given, settings
from hypothesis import strategies as st
from test_core_virtual import ask

from smpart.engine.core import EngineCore
from smpart.engine.crossing import Crossing
from smpart.engine.deployment import Deployment
from smpart.engine.ghost import GhostBoard, GhostBody
from smpart.engine.request import FinishReason
from smpart.errors import UsageError
from smpart.kvcache import BlockPool
from smpart.partition import Device, ModelShape, Shape, Side, Split
from smpart.partition.link import Link
from smpart.partition.sim import SimLanes
from smpart.scheduler import SLO, make_policy
from smpart.sim import built_in

OPT_66B = ModelShape(64, 9216, 72, 72, 128, 50272, 0, 0, 0, 2)
TOKEN = 1000
"""KV bytes of a token here."""


def cost(shape: Shape, units: int, neighbour: Shape, neighbour_units: int) -> float:
    return 1e-3 + 1e-5 * shape.tokens


def two(
    link: Link, *, price=cost, blocks: int = 64, there: int | None = None, slots: int = 8, max_len: int = 256
) -> EngineCore:
    lanes = SimLanes(Device("two", "sim", 8, tuple(range(8)), 1 << 30), (Split(4, 4),), price, GhostBody)
    crossing = Crossing(BlockPool(there or blocks, 16), link, TOKEN)
    return EngineCore(
        lanes, make_policy("disagg"), Constant(), BlockPool(blocks, 16), GhostBoard(slots, max_len), layers=4,
        lead_s=float("-inf"), crossing=crossing,
    )  # fmt: skip


def drain(core: EngineCore) -> None:
    for _ in range(20_000):
        if core.idle:
            return
        core.turn()
    raise AssertionError("the core never became idle")


def assert_nothing_held(core: EngineCore) -> None:
    for pool in (core.state.pool, core.state.crossing.pool):
        pool.check()
        assert pool.owned == 0 and pool.free == pool.blocks
    assert core.state.residency.free_slots == 8 and len(core.state.table) == 0 and core.state.lands is None


def test_kv_sizes_and_rates_are_those_of_the_papers() -> None:
    """DistServe: 512 tokens of OPT-66B are 1.13 GB, and 10 requests a second need 90 Gbit/s."""
    size = 512 * OPT_66B.kv_token_bytes
    assert size / 2**30 == pytest.approx(1.13, abs=0.01)
    assert Link.gbps(90.0, 0.0).busy(10 * size) == pytest.approx(1.0, rel=0.08)  # 90 Gbit/s of 2**30 bytes
    assert built_in("llama-3.1-8b").kv_token_bytes == 128 * 1024
    with pytest.raises(UsageError, match="above 0"):
        Link.gbps(0.0, 0.0)


@settings(max_examples=40)
@given(seed=st.integers(0, 10_000), there=st.sampled_from([17, 24, 64]), speed=st.sampled_from([1e5, 1e7, 1e12]))
def test_every_request_ends_with_all_its_tokens(seed: int, there: int, speed: float) -> None:
    rng = np.random.default_rng(seed)
    core = two(Link(speed, 1e-4), there=there)
    requests = [ask(i, p, int(rng.integers(1, 20))) for i, p in enumerate(prompts(rng, 12, 200))]
    cancelled = set()
    for request in requests:
        core.add(request)
        for _ in range(int(rng.integers(0, 6))):
            if not core.idle:
                core.turn()
        if rng.random() < 0.3:
            victim = requests[int(rng.integers(0, request.id + 1))]
            if not victim.finished:
                cancelled.add(victim.id)
            core.cancel(victim)
    drain(core)
    assert_nothing_held(core)
    for request in requests:
        wanted = FinishReason.CANCELLED if request.id in cancelled else FinishReason.LENGTH
        assert request.finish_reason is wanted
        assert request.id in cancelled or len(request.token_ids) == request.params.max_tokens


def test_the_second_token_waits_for_the_kv_and_the_first_does_not() -> None:
    core = two(Link(1e6, 0.5))
    request = ask(0, range(100), 3)
    core.add(request)
    drain(core)
    first, second, third = request.times
    assert first == pytest.approx(cost(Shape.prefill([(100, 0)]), 4, Shape(), 0))
    step = cost(Shape.decode(1, 101), 4, Shape(), 0)
    assert second - first == pytest.approx(100 * TOKEN / 1e6 + 0.5 + step)
    assert third - second == pytest.approx(step)


def test_an_answer_of_one_token_never_crosses() -> None:
    core = two(Link(1.0, 1e6))
    request = ask(0, range(100), 1)
    core.add(request)
    drain(core)
    assert core.now() < 1.0
    assert_nothing_held(core)


def test_transfers_follow_each_other_and_latencies_overlap() -> None:
    """Three prompts of one batch: the link is busy 0.1 s with each, and each lands 0.5 s after it was sent."""
    core = two(Link(1e6, 0.5), blocks=200)
    requests = [ask(i, range(1000 * i, 1000 * i + 100), 2) for i in range(3)]
    for request in requests:
        core.add(request)
    drain(core)
    second = [request.times[1] for request in requests]
    assert second[0] == pytest.approx(0.6, abs=0.01)
    assert [b - a for a, b in pairwise(second)] == pytest.approx([0.1, 0.1], abs=0.005)


def test_kv_stays_where_it_was_prefilled_until_decode_has_room() -> None:
    core = two(Link(1e9, 0.0), blocks=16, there=16)
    long, later = ask(0, range(200), 40), ask(1, range(1000, 1200), 2)
    core.add(long)
    core.add(later)
    while len(later.times) < 1:
        core.turn()
    held_here, held_there = core.state.pool.owned, core.state.crossing.pool.owned
    assert (held_here, held_there >= 13) == (13, True), "one prompt on each device"
    drain(core)
    assert later.times[1] > long.times[-1], "it was pulled when the first had ended"
    assert_nothing_held(core)


def test_a_prefix_is_found_where_prompts_are_computed() -> None:
    core = two(Link(1e9, 0.0))
    first, second = ask(0, range(64), 2), ask(1, range(64), 2)
    for request in (first, second):
        core.add(request)
        drain(core)
    assert (first.cached_tokens, second.cached_tokens) == (0, 48)


def test_neither_device_feels_the_other() -> None:
    with Deployment.open("llama-3.1-8b", backend="sim:h100-roofline", dtype="bfloat16", profile="none") as deployment:
        core = deployment.core("disagg", SLO())
        busy, lone = core.lanes, deployment.core("disagg", SLO()).lanes
        price = busy._cost
        step, head = Shape.decode(8, 8000), Shape.prefill([(4000, 0)])
        assert (
            price(step, 132, head, 132) == price(step, 132, Shape(), 0) == deployment.lanes._cost(step, 132, Shape(), 0)
        )
        assert busy is not lone and busy.splits() == (Split(132, 132),) and core.devices == 2
        assert not busy.realised(Side.PREFILL)
        assert deployment.core("overlap", SLO()).devices == 1


def test_first_tokens_come_as_queueing_theory_says() -> None:
    """DistServe's M/D/1: D = 0.1 s, 5 requests a second, so 0.15 s on average (prompts too long to be batched)."""

    def tenth(shape: Shape, units: int, neighbour: Shape, neighbour_units: int) -> float:
        return 0.1 if shape.prefill_tokens else 1e-3

    core = two(Link(1e12, 0.0), price=tenth, blocks=4000, slots=200, max_len=600)
    rng = np.random.default_rng(3)
    arrivals = np.cumsum(rng.exponential(0.2, 4000)).tolist()
    requests, begun = [], 0
    while begun < len(arrivals) or not core.idle:
        while begun < len(arrivals) and arrivals[begun] <= core.now():
            request = ask(begun, range(550), 1, arrival=arrivals[begun], hashes=())
            requests.append(request)
            core.add(request)
            begun += 1
        core.turn(arrivals[begun] if begun < len(arrivals) else None)
    waits = [request.times[0] - request.arrival for request in requests]
    assert np.mean(waits) == pytest.approx(0.1 + 5 * 0.1**2 / (2 * (1 - 5 * 0.1)), rel=0.06)


def test_one_device_is_not_two() -> None:
    lanes = SimLanes(Device("one", "sim", 4, tuple(range(4)), 1 << 30), (Split(0, 4), Split(4, 0)), cost, GhostBody)
    core = EngineCore(
        lanes, make_policy("disagg"), Constant(), BlockPool(64, 16), GhostBoard(8, 256), layers=4, lead_s=0.0
    )
    core.add(ask(0, range(9), 2))
    with pytest.raises(UsageError, match="one device, and it needs two"):
        core.turn()
