"""A measured closed loop, replayed in virtual time."""

from __future__ import annotations

from itertools import count

from smpart.bench.silicon.core import BLOCK_TOKENS, PATIENT, virtual_core
from smpart.bench.silicon.engines import engine_of
from smpart.bench.silicon.points import EndToEnd
from smpart.bench.silicon.run import Latency, latency
from smpart.engine.core import EngineCore
from smpart.engine.request import Request
from smpart.partition import Shape
from smpart.partition.gpus import GPUS
from smpart.runtime.sampling import SamplingParams
from smpart.sim import Host, SiliconCost

_USED = 0.9
"""Share of the memory for weights and KV: the engines' default."""

_PACKED = 8192
"""Tokens of a prefill at its best."""


def predict(point: EndToEnd, host: Host | None = None) -> Latency:
    """The closed loop of a point: so many clients, each sending its next request when it has the last answer.

    Args:
        host: the engine's overheads; None: as `engine_of` says.
    """
    engine = engine_of(point)
    model, gpu = point.model, GPUS[point.gpu]
    element = 1 if model.kv == "fp8" else 2
    token = 2 * model.layers * model.kv_width * element
    blocks = int((_USED * gpu.memory_bytes - model.rank.weight_bytes) / (token * BLOCK_TOKENS))
    cost = SiliconCost(model, point.gpu, engine=point.engine, host=host or engine.host, pads=False)
    sequences = max(256, point.concurrency)
    core = virtual_core(model.rank, point.gpu, cost, engine.policy(), blocks=blocks, sequences=sequences)
    return closed_loop(core, point.concurrency, point.prompt, point.output, together=point.together)


def closed_loop(core: EngineCore, clients: int, prompt: int, output: int, *, together: bool) -> Latency:
    """Serve clients that each send their next request when they have the last answer; each one's second counts.

    Args:
        together: all clients begin at once with whole answers. Otherwise the first answers are cut to even shares of
            `output`, so that clients are out of step as they are after a while of requests of unequal sizes.
    """
    numbers = count()

    def following() -> Request:
        number = next(numbers)
        length = output if together or number >= clients else max(1, output * (number + 1) // clients)
        params = SamplingParams(max_tokens=length, ignore_eos=True)
        return Request(number, range(prompt), params, PATIENT, hashes=())

    counted: list[Request] = []
    for _ in range(clients):
        core.add(following())
    while len(counted) < clients:
        for finished in core.turn():
            if clients <= finished.id < 2 * clients:
                counted.append(finished)
            core.add(following())
    return latency([(request.arrival or 0.0, request.times) for request in counted])


def busy(point: EndToEnd) -> float:
    """Share of the time that a point's own throughput keeps its GPUs busy, by the op tables and without overheads.

    By Little's law so many clients with such latencies finish ``clients / (TTFT + (output - 1) * TPOT)`` requests a
    second; each takes its share of a packed prefill and of decode steps. A point beyond 1 contradicts what its kernels
    were timed at: its prompts were cached, its clients were fewer, or the tables are slow.
    """
    cost = SiliconCost(point.model, point.gpu, engine=point.engine, host=Host(step=0.0), pads=False)
    units, clients, nobody = GPUS[point.gpu].sms, point.concurrency, Shape()
    packed = max(1, _PACKED // point.prompt)
    prefill = cost(Shape.prefill([(point.prompt, 0)] * packed), units, nobody, 0) / packed
    context = round(clients * (point.prompt + point.output / 2))
    decode = cost(Shape.decode(clients, context), units, nobody, 0) * point.output / clients
    return (prefill + decode) * clients / (point.ttft + (point.output - 1) * point.tpot)
