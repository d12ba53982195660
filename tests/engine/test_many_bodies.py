"""An engine on lanes where a new split of a side means another body: it knows only what it was told itself."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest
from chaos import Chaos, Constant, prompts
from test_core_virtual import ask, cost, drain

from smpart.engine.core import EngineCore
from smpart.engine.ghost import GhostBoard, GhostBody
from smpart.kvcache import BlockPool
from smpart.partition import Device, Side, Split
from smpart.partition.feasible import feasible_splits
from smpart.partition.sim import SimLanes


class Pool(SimLanes):
    """A body for every share, each of which remembers its samplers; every launch is looked at."""

    def __init__(self, units: int) -> None:
        super().__init__(
            Device("sim", "sim", units, tuple(range(units)), 1 << 30), feasible_splits(units), cost, GhostBody
        )
        self.told = defaultdict(dict)
        self.core: EngineCore | None = None

    def body(self, side: Side, split: Split):
        return side, split.units(side)

    def launch(self, work) -> None:
        segment, told = work.payload, self.told[self.body(work.side, work.split)]
        assert segment.layers is None and not segment.drop, "a forward paused here goes on in no other body"
        told.update(segment.samplers)
        batch = segment.batch
        sampled = [*batch.decode_slots.tolist(), *(chunk.slot for chunk in batch.chunks if chunk.sample)]
        state = self.core.state
        owners = {int(state.table.slot[row]): request for row, request in state.requests.items()}
        for slot in sampled:
            assert slot in told, "it must sample for a request that this body has not heard of"
            assert slot not in owners or told[slot].seed == owners[slot].seed, (
                "it knows the slot's owner before this one"
            )
        super().launch(work)


@pytest.mark.parametrize("seed", range(12))
def test_forwards_are_whole_and_each_body_is_told_what_it_samples_with(seed: int) -> None:
    rng, lanes = np.random.default_rng(seed), Pool(6)
    core = EngineCore(
        lanes, Chaos(seed), Constant(), BlockPool(40, 16), GhostBoard(8, 256), layers=4, lead_s=float("inf"), seed=seed
    )
    lanes.core = core
    requests = [ask(i, prompt, int(rng.integers(1, 9))) for i, prompt in enumerate(prompts(rng, 24, 150))]
    for request in requests:
        core.add(request)
        core.turn(core.now())
        if rng.random() < 0.1:
            core.cancel(requests[int(rng.integers(0, request.id + 1))])
    drain(core)
    assert all(request.finish_reason is not None for request in requests)
    assert len(lanes.told) > 4
