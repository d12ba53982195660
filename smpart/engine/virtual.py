"""A deployment in virtual time: a model's shape on a simulated GPU. No weights, no tokens, no waiting."""

from __future__ import annotations

import math
from dataclasses import replace

from smpart.engine.deployment import Deployment
from smpart.engine.ghost import GhostBoard, GhostBody
from smpart.engine.profiles import Wanted, predictor_of
from smpart.errors import UsageError
from smpart.kvcache import KVConfig, KVLayout, blocks_that_fit, pool_blocks
from smpart.partition import Device, Shape, Split
from smpart.partition.link import Link
from smpart.partition.sim import Cost, Sim, SimLanes
from smpart.predictor import OnlinePredictor, RooflinePrior
from smpart.profiler.fingerprint import Fingerprint
from smpart.runtime.models import load_config, load_config_shape
from smpart.sim import DIMENSIONS, Dimensions, RooflineCost, SiliconCost, dimensions
from smpart.sim.links import LATENCY_S, LINKS

_LONGEST = 131_072
"""Longest request, unless the user says otherwise or the memory is smaller."""

_USED = 0.9
"""Share of the GPU's memory for weights and KV, as public serving stacks take by default."""


def deploy_virtual(model: str, backend: Sim, kv: KVConfig, dtype: str, wanted: Wanted) -> Deployment:
    """Place a model's shape on a simulated GPU.

    Raises:
        UsageError: an unknown model, one that does not fit into the GPU's memory, or a profile of another.
        BackendUnavailable: the measurements that price this GPU are not installed; the message names the extra.
        UnsupportedModel: kernels of a kind that was not measured.
    """
    sizes = _sizes(model, dtype, backend.ranks)
    shape, device = sizes.rank, backend.device()
    profile = wanted.choose(Fingerprint.of(backend.name, device, shape, dtype))
    if shape.weight_bytes >= (usable := _USED * device.memory_bytes):
        ranks = backend.ranks * 2 ** math.ceil(math.log2(1.01 * shape.weight_bytes / usable))
        raise UsageError(
            f"{model} does not fit into the memory of {backend.name}: its weights take {shape.weight_bytes / 1e9:.0f} "
            f"of {device.memory_bytes / 1e9:.0f} GB; share it out (sim:{backend.gpu}x{ranks}) or take a model in fp8"
        )
    layout = KVLayout(shape.layers, shape.kv_heads, shape.head_dim, dtype, kv.block_tokens)
    if kv.blocks is None and kv.memory_bytes is None:
        kv = replace(kv, memory_bytes=max(1, int(_USED * device.memory_bytes) - shape.weight_bytes))
    fits = (kv.blocks or blocks_that_fit(layout, kv.memory_bytes or 0)) * kv.block_tokens
    max_len = kv.max_len or max(1, min(_LONGEST, fits))
    blocks = pool_blocks(kv, layout, max_len, device.memory_bytes, shape.weight_bytes)
    cost = _cost(sizes, backend)

    def pair(link_gbps: float | None) -> tuple[SimLanes, GhostBoard, Link]:
        link = LINKS[backend.gpu] if link_gbps is None else Link.gbps(link_gbps, LATENCY_S)
        return _two(device, cost), GhostBoard(2 * kv.max_requests, max_len), link

    lanes = SimLanes(device, backend.splits(), cost, GhostBody)
    return Deployment(
        name=model,
        backend=backend.name,
        virtual=True,
        lanes=lanes,
        board=GhostBoard(kv.max_requests, max_len),
        kv=kv,
        blocks=blocks,
        model_shape=shape,
        dtype=dtype,
        predictor=OnlinePredictor(RooflinePrior(shape, device)) if profile is None else predictor_of(profile),
        profile=profile,
        lead_s=-math.inf,
        gpus=backend.ranks,
        pair=pair,
    )


def _two(device: Device, cost: Cost) -> SimLanes:
    """Two devices as one that can be cut in one way only, and where no lane feels the other."""
    units, nobody = device.units, Shape()

    def alone(shape: Shape, own: int, neighbour: Shape, neighbour_units: int) -> float:
        return cost(shape, own, nobody, 0)

    both = replace(device, name=f"two {device.name}", units=2 * units, unit_ids=tuple(range(2 * units)))
    return SimLanes(both, (Split(units, units),), alone, GhostBody)


def _sizes(model: str, dtype: str, ranks: int) -> Dimensions:
    """A built-in model, or any configuration; 16- and 32-bit weights take the room that `dtype` says."""
    if model in DIMENSIONS:
        return replace(DIMENSIONS[model], ranks=ranks)
    shape = load_config_shape(model, dtype=dtype)
    sizes = dimensions(load_config(model), ranks=ranks)
    return sizes if sizes.weights != "bfloat16" else replace(sizes, shape=shape)


def _cost(sizes: Dimensions, backend: Sim) -> Cost:
    if backend.roofline:
        return RooflineCost(sizes.rank, backend.gpu)
    return SiliconCost(sizes, backend.gpu, contention=backend.contention)
