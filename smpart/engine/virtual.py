"""A deployment in virtual time: a model's shape on a simulated GPU. No weights, no tokens, no waiting."""

from __future__ import annotations

from smpart.engine.deployment import Deployment
from smpart.engine.ghost import GhostBoard, GhostBody
from smpart.kvcache import KVConfig, KVLayout, pool_blocks
from smpart.partition.sim import Sim, SimLanes
from smpart.predictor import OnlinePredictor, RooflinePrior
from smpart.runtime.models import load_config_shape
from smpart.sim import MODELS, RooflineCost

_LONGEST = 131_072


def deploy_virtual(model: str, backend: Sim, kv: KVConfig, dtype: str) -> Deployment:
    """Place a model's shape on a simulated GPU.

    Raises:
        UsageError: an unknown model, or one that does not fit into the GPU's memory.
    """
    shape = MODELS.get(model) or load_config_shape(model, dtype=dtype)
    device = backend.device()
    max_len = kv.max_len or _LONGEST
    layout = KVLayout(shape.layers, shape.kv_heads, shape.head_dim, dtype, kv.block_tokens)
    blocks = pool_blocks(kv, layout, max_len, device.memory_bytes, shape.weight_bytes)
    lanes = SimLanes(device, backend.splits(), RooflineCost(shape, backend.gpu), GhostBody)
    return Deployment(
        name=model,
        backend=backend.name,
        virtual=True,
        lanes=lanes,
        board=GhostBoard(kv.max_requests, max_len),
        kv=kv,
        blocks=blocks,
        model_shape=shape,
        predictor=OnlinePredictor(RooflinePrior(shape, device)),
        lead_s=0.0,
    )
