"""A partitioned GPU as others measured it: kernels from their timings, then SMs, neighbour and host.

Whole-GPU times are sums of measured kernels (`smpart.sim.measured`, `smpart.sim.rtx4090`). Fewer SMs and neighbours
were measured by hardly anyone: `smpart.sim.scaling` states what is assumed, and `contention` sweeps it.
"""

from __future__ import annotations

from functools import lru_cache

from smpart.errors import UsageError
from smpart.partition import Shape
from smpart.partition.gpus import GPUS
from smpart.sim import op_tables
from smpart.sim.dimensions import Dimensions
from smpart.sim.host import HOSTS, Host
from smpart.sim.kernels import Kernels
from smpart.sim.measured import measured
from smpart.sim.rtx4090 import Rtx4090
from smpart.sim.scaling import Load, Scaling
from smpart.sim.sharing import crowding

_REMEMBERED = 1 << 16
"""Loads kept by number of tokens, or of sampled positions, and by SMs."""

_RECENT = 4
"""Loads kept of whole shapes: a work is priced anew on every event of its neighbour, later shapes are others."""


class SiliconCost:
    """Prices a whole forward; a `smpart.partition.sim.Cost`.

    Args:
        gpu: a name of `smpart.partition.gpus.GPUS`.
        engine: whose kernels, one of `op_tables.ENGINES`; of an RTX 4090 there are vLLM's alone.
        host: the engine's overheads; None: `HOSTS` of the engine.
        pads: see `Measured`; the engines that were timed do not.
        contention: multiplies the kernels' time beside a neighbour: 1.1 makes a neighbour 10 % worse than assumed.

    Raises:
        UsageError: no such GPU or engine, or the RTX 4090's measurements are absent.
        BackendUnavailable: the op tables are not installed; the message names the extra.
        UnsupportedModel: weights or sizes of a kind that was not timed.
    """

    def __init__(
        self,
        model: Dimensions,
        gpu: str,
        *,
        engine: str = "vllm",
        host: Host | None = None,
        pads: bool = True,
        contention: float = 1.0,
    ) -> None:
        if gpu not in GPUS:
            raise UsageError(f"no GPU {gpu!r} is known; there are {', '.join(GPUS)}")
        if engine not in op_tables.ENGINES:
            raise UsageError(f"no engine {engine!r} was timed; there are {', '.join(op_tables.ENGINES)}")
        self._kernels: Kernels = Rtx4090(model) if gpu == "rtx4090" else measured(model, gpu, engine, pads)
        self._scaling = Scaling(gpu)
        self._units = GPUS[gpu].sms
        self._host = host or HOSTS[engine]
        self._contention = contention
        self._layer_parts = lru_cache(maxsize=_REMEMBERED)(self._kernels.layers)
        self._layers = lru_cache(maxsize=_REMEMBERED)(self._layers_of)
        self._head = lru_cache(maxsize=_REMEMBERED)(self._head_of)
        self._recent: tuple[tuple[Shape, int, Load], ...] = ()

    def __call__(self, shape: Shape, units: int, neighbour: Shape, neighbour_units: int) -> float:
        """Seconds of the forward, the neighbour running all the while (empty and 0: nobody).

        Where both have more units than there are, they share SMs as `smpart.sim.sharing` states.
        """
        mine, host = self._load(shape, units), self._host
        if neighbour_units == 0 or not (neighbour.prefill_tokens or neighbour.decode_batch):
            return host.seconds(shape) + host.pace * (mine[0] + mine[1])
        theirs, crowded = self._load(neighbour, neighbour_units), 1.0
        if units + neighbour_units > self._units:
            crowded = crowding(self._scaling.demand(mine, units), self._scaling.demand(theirs, neighbour_units))
        return host.seconds(shape) + host.pace * self._contention * mine.beside(theirs, crowded)

    def _load(self, shape: Shape, units: int) -> Load:
        for same, on, load in self._recent:
            if same is shape and on == units:
                return load
        load = self._load_of(shape, units)
        self._recent = ((shape, units, load), *self._recent[: _RECENT - 1])
        return load

    def _load_of(self, shape: Shape, units: int) -> Load:
        batch = shape.decode_batch
        a1, a2, a3 = self._scaling.one(self._kernels.attention(shape), units)
        b1, b2, b3 = self._layers(shape.prefill_tokens + batch, units)
        c1, c2, c3 = self._head(shape.prefill_chunks + batch, units)
        return Load(a1 + b1 + c1, a2 + b2 + c2, a3 + b3 + c3)

    def _layers_of(self, tokens: int, units: int) -> Load:
        return self._scaling.load(self._layer_parts(tokens), units)

    def _head_of(self, sampled: int, units: int) -> Load:
        return self._scaling.load(self._kernels.head(sampled), units)
