"""An engine core in virtual time as those engines run that were measured."""

from __future__ import annotations

import math

from smpart.engine.core import EngineCore
from smpart.engine.ghost import GhostBoard, GhostBody
from smpart.kvcache import BlockPool
from smpart.partition import ModelShape
from smpart.partition.registry import open_backend
from smpart.partition.sim import Cost, SimLanes
from smpart.predictor import OnlinePredictor, RooflinePrior
from smpart.scheduler.plan import Policy
from smpart.scheduler.slo import SLO

PATIENT = SLO(ttft_ms=1e9, tpot_ms=1e9)
"""Nobody measured refused a request."""

BLOCK_TOKENS = 16


def virtual_core(
    model: ModelShape, gpu: str, cost: Cost, policy: Policy, *, blocks: int, sequences: int, ahead: bool = False
) -> EngineCore:
    """A core on a simulated GPU.

    Args:
        model: as one rank has it.
        policy: the engine's rule.
        sequences: requests that may hold memory at once.
        ahead: a step is planned while the one before it runs (vLLM's asynchronous scheduling), not when that has ended.
    """
    backend = open_backend(f"sim:{gpu}")
    device, splits = backend.device(), backend.splits()
    return EngineCore(
        SimLanes(device, splits, cost, GhostBody),
        policy,
        OnlinePredictor(RooflinePrior(model, device)),
        BlockPool(blocks, BLOCK_TOKENS),
        GhostBoard(sequences, blocks * BLOCK_TOKENS),
        layers=model.layers,
        lead_s=math.inf if ahead else -math.inf,
    )
