"""A roofline of a partitioned GPU: what a forward costs on some of the SMs, beside another one on the rest.

The form is Bullet's (arXiv 2504.19516, section 3.2): each kind of operation takes the longer of its arithmetic and its
memory traffic; arithmetic grows with the SMs, bandwidth saturates before all SMs are used. The constants below are
fitted to published curves; none comes from a predictor of ours.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

from smpart.errors import UsageError
from smpart.partition import ModelShape, Shape
from smpart.partition.gpus import GPUS
from smpart.sim.gpus import PEAKS
from smpart.sim.sharing import crowding, demand, held

_FLOPS_REACHED = 0.62
"""Share of peak arithmetic that a transformer's kernels reach: 1 / 1.61, Bullet's mean of measured over roofline."""

_BANDWIDTH_REACHED = 0.80
"""Share of peak bandwidth that weights and paged KV stream at; decode in public serving stacks reaches 0.75 to 0.85."""

_ARITHMETIC_BEND = 0.3
"""Arithmetic grows a little slower than the SMs: prefill gains 25 % of latency from 30 to 40 % of them and 10 % from
70 to 80 % (linear growth would give 25 and 12.5 %)."""

_BANDWIDTH_KNEE = 0.18
"""Share of the SMs in which bandwidth saturates exponentially: decode gains 10 % of latency from 30 to 40 % of the
SMs, and under 3 % per further 10 % beyond half."""

_HELD = held(_BANDWIDTH_KNEE)

_INTERFERENCE = 0.15
"""Bandwidth lost, beyond fair sharing, at full traffic of the neighbour (L2 misses, row conflicts): keeps decode's
slowdown beside prefill under the 20 % (A100) and 30 % (H100) that MuxWise (arXiv 2504.14489) measured at worst."""

_COMPANY = 1.009
"""What any neighbour costs, however little memory it touches (power, instruction issue, caches): published pairs of
co-running kernels went as low as +0.9 % beyond their share of the SMs."""

_LAUNCH_SECONDS = 250e-6
"""What one forward costs apart from its kernels: launching graphs or layers, sampling."""


class _Solo(NamedTuple):
    """One forward without a neighbour: seconds by kind of operation, and what it asks for of bandwidth and SM time."""

    weights_compute: float
    weights_memory: float
    prefill_compute: float
    prefill_memory: float
    decode_memory: float
    asked: float
    sms: float


class RooflineCost:
    """Prices a whole forward; a `smpart.partition.sim.Cost`.

    Args:
        gpu: a name of `PEAKS`.

    Raises:
        UsageError: no such GPU.

    >>> from smpart.sim import built_in
    >>> cost = RooflineCost(built_in("llama-3.1-8b"), "h100")
    >>> step = Shape.decode(batch=8, context=8 * 1024)
    >>> cost(step, 132, Shape(), 0) < cost(step, 36, Shape(), 0) < cost(step, 36, Shape.prefill([(8192, 0)]), 96)
    True
    """

    def __init__(self, model: ModelShape, gpu: str) -> None:
        if gpu not in PEAKS:
            raise UsageError(f"no GPU {gpu!r} is known; there are {', '.join(PEAKS)}")
        peaks = PEAKS[gpu]
        self._model = model
        self._flops = peaks.flops * _FLOPS_REACHED
        self._bandwidth = peaks.bandwidth * _BANDWIDTH_REACHED
        self._units = GPUS[gpu].sms
        self._solo = lru_cache(maxsize=1024)(self._price)

    def __call__(self, shape: Shape, units: int, neighbour: Shape, neighbour_units: int) -> float:
        """Seconds of the forward, the neighbour running all the while (empty and 0: nobody)."""
        mine = self._solo(shape, units)
        if neighbour_units == 0 or neighbour.tokens == 0:
            return _LAUNCH_SECONDS + _kernels(*mine[:5], 1.0)
        theirs, crowded = self._solo(neighbour, neighbour_units), 1.0
        if units + neighbour_units > self._units:
            crowded = crowding(mine.sms, theirs.sms)
        slower = max(crowded, mine.asked + theirs.asked) * (1.0 + _INTERFERENCE * theirs.asked)
        return _LAUNCH_SECONDS + _COMPANY * _kernels(*mine[:5], slower, crowded)

    def _price(self, shape: Shape, units: int) -> _Solo:
        model, share = self._model, units / self._units
        flops = self._flops * share * (1.0 + _ARITHMETIC_BEND) / (1.0 + _ARITHMETIC_BEND * share)
        bandwidth = self._bandwidth * math.expm1(-share / _BANDWIDTH_KNEE) / math.expm1(-1.0 / _BANDWIDTH_KNEE)
        sampled = shape.prefill_chunks + shape.decode_batch
        linear = 2.0 * (model.linear_params * shape.tokens + model.head_params * sampled)
        pairs = 4.0 * model.layers * model.heads * model.head_dim * shape.prefill_pairs
        prefill = float(model.kv_token_bytes) * (shape.prefill_context + shape.prefill_tokens)
        decode = float(model.kv_token_bytes) * (shape.decode_context + shape.decode_batch)
        times = (linear / flops, model.weight_bytes / bandwidth, pairs / flops, prefill / bandwidth, decode / bandwidth)
        seconds = _LAUNCH_SECONDS + _kernels(*times, 1.0)
        rate = (model.weight_bytes + prefill + decode) / seconds
        computing = (times[0] if times[0] > times[1] else 0.0) + (times[2] if times[2] > times[3] else 0.0)
        streaming = _kernels(*times, 1.0) - computing
        sms = demand(computing / seconds, streaming / seconds, share, _HELD)
        return _Solo(*times, rate / self._bandwidth, sms)


def _kernels(
    weights_compute: float,
    weights_memory: float,
    prefill_compute: float,
    prefill_memory: float,
    decode_memory: float,
    slower: float,
    crowded: float = 1.0,
) -> float:
    """Seconds of a forward's kernels: memory `slower`, arithmetic `crowded` times as slow as without a neighbour."""
    weights = max(weights_compute * crowded, weights_memory * slower)
    prefill = max(prefill_compute * crowded, prefill_memory * slower)
    return weights + prefill + decode_memory * slower
