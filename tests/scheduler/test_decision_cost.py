"""What a decision costs, the snapshot included: a real engine core in virtual time; nothing is asserted on time."""

from __future__ import annotations

import math
from itertools import count

import numpy as np
import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from smpart.engine.core import EngineCore
from smpart.engine.ghost import GhostBoard, GhostBody
from smpart.engine.request import Request
from smpart.kvcache import BlockPool
from smpart.partition.registry import open_backend
from smpart.partition.sim import SimLanes
from smpart.predictor import OnlinePredictor, RooflinePrior
from smpart.runtime.sampling import SamplingParams
from smpart.scheduler import SLO, make_policy
from smpart.sim import MODELS, RooflineCost

RUNNING, TURNS = 256, 400
OBJECTIVES = SLO(2000, 60)


class Crowd:
    """256 requests that decode for long, and short ones that come and go beside them."""

    def __init__(self, queued: int) -> None:
        backend, shape = open_backend("sim:h100"), MODELS["llama-3.1-8b"]
        device = backend.device()
        lanes = SimLanes(device, backend.splits(), RooflineCost(shape, backend.gpu), GhostBody)
        predictor = OnlinePredictor(RooflinePrior(shape, device))
        policy = make_policy("smpart", slo=OBJECTIVES, splits=lanes.splits())
        board = GhostBoard(RUNNING + 8, 16_384)
        self.core = EngineCore(
            lanes, policy, predictor, BlockPool(200_000, 16), board, layers=shape.layers, lead_s=-math.inf
        )
        self.rng, self.numbers, self.queued = np.random.default_rng(0), count(), queued
        requests = [self.add(10_000) for _ in range(RUNNING)]
        while not all(request.times for request in requests):
            self.core.turn()
        self.refill()

    def add(self, tokens: int) -> Request:
        prompt = range(int(self.rng.integers(20, 1200)))
        params = SamplingParams(max_tokens=tokens, ignore_eos=True)
        request = Request(next(self.numbers), prompt, params, OBJECTIVES, hashes=())
        self.core.add(request)
        return request

    def refill(self) -> None:
        """As many waiting as there should be."""
        for _ in range(self.queued - len(self.core._snapshot().waiting)):
            self.add(int(self.rng.integers(10, 50)))


@pytest.mark.slow
@pytest.mark.parametrize("queued", [64, 1000])
def test_the_cost_of_a_decision_in_an_engine(benchmark: BenchmarkFixture, queued: int) -> None:
    """The time measured is that of one decision again and again; `extra_info` has those of a run (microseconds)."""
    crowd = Crowd(queued)
    core = crowd.core
    before = len(core.log.decision_seconds)
    for _ in range(TURNS):
        core.turn()
        crowd.refill()
    micros = 1e6 * np.array(core.log.decision_seconds[before:])
    assert len(micros)
    assert len(core._snapshot().running) >= 0.9 * RUNNING
    quantiles = np.percentile(micros, [50, 99])
    benchmark.extra_info["run"] = {"p50": float(quantiles[0]), "p99": float(quantiles[1])}
    benchmark.pedantic(lambda: core.policy.plan(core._snapshot()), rounds=500, warmup_rounds=20)
    if benchmark.stats is not None:
        again = 1e6 * np.percentile(benchmark.stats.stats.data, [50, 99])
        benchmark.extra_info["again"] = {"p50": float(again[0]), "p99": float(again[1])}
