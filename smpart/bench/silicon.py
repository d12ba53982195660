"""The simulated GPUs against silicon: a real run replayed in virtual time, and measured end-to-end points."""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from smpart.bench.replay import Job, replay
from smpart.engine.core import EngineCore
from smpart.engine.ghost import GhostBoard, GhostBody
from smpart.engine.request import Request
from smpart.kvcache import BlockPool
from smpart.partition import ModelShape, Shape
from smpart.partition.gpus import GPUS
from smpart.partition.registry import open_backend
from smpart.partition.sim import Cost, SimLanes
from smpart.predictor import OnlinePredictor, RooflinePrior
from smpart.runtime.sampling import SamplingParams
from smpart.scheduler.registry import make_policy
from smpart.scheduler.slo import SLO
from smpart.sim import DIMENSIONS, Dimensions, SiliconCost
from smpart.sim.op_tables import FOLDERS, systems
from smpart.sim.published import data_file
from smpart.sim.rtx4090 import FOLDER, TIMED

Floats = NDArray[np.float64]

FITTED_ON = 100
"""Requests of the real run that constants may be fitted on; the others are predicted."""

WARM_UP_S = 0.3
"""What the real run's first step took beyond what later ones would (compilation, caches): fitted on its first request,
whose first token came after 0.69 s. With `HOSTS["vllm"].step` the only constant of it."""

_PATIENT = SLO(ttft_ms=1e9, tpot_ms=1e9)
_BLOCK = 16


class Latency(NamedTuple):
    """Seconds of each request."""

    ttft: Floats
    tpot: Floats


class Run(NamedTuple):
    """The real run, in order of arrival: arrival seconds from the first one, tokens, and what was measured."""

    arrivals: Floats
    prompts: list[int]
    outputs: list[int]
    measured: Latency


def real_run() -> Run:
    """300 requests that vLLM 0.19 served on an RTX 4090. Raises `UsageError` where the file is absent.

    The engine's clock and the clients' differ by a constant: the least lag from a client's send to the engine's queue
    counts as none.
    """
    with data_file(f"{FOLDER}/vllm_requests.jsonl").open(encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    sent, queued, first, last = (
        np.array([row[name] for row in rows])
        for name in ("arrival_time", "queued_ts", "first_token_ts", "last_token_ts")
    )
    outputs = [int(row["output_toks"]) for row in rows]
    tpot = (last - first) / (np.array(outputs) - 1)
    latency = Latency(first - (sent + (queued - sent).min()), tpot)
    return Run(sent - sent[0], [int(row["input_toks"]) for row in rows], outputs, latency)


def replay_real_run(run: Run) -> Latency:
    """The same requests under vLLM's rule and limits, in virtual time."""
    model = DIMENSIONS[TIMED]
    cost = _warming_up(SiliconCost(model, "rtx4090"), WARM_UP_S)
    core = _core(model.shape, "rtx4090", cost, blocks=2588, sequences=256, budget=2048)
    jobs = [
        Job(float(due), range(i << 20, (i << 20) + prompt), SamplingParams(max_tokens=output, ignore_eos=True))
        for i, (due, prompt, output) in enumerate(zip(run.arrivals, run.prompts, run.outputs, strict=True))
    ]
    return _latency([(s.due_s, s.times_s) for s in replay(core, jobs, _PATIENT).served])


def summary(latency: Latency, which: slice) -> dict[str, float]:
    """Seconds: mean, median and 95th percentile of TTFT and TPOT."""
    kinds: dict[str, Callable[[Floats], np.floating]] = {
        "mean": np.mean,
        "p50": lambda x: np.percentile(x, 50),
        "p95": lambda x: np.percentile(x, 95),
    }
    parts = {"TTFT": latency.ttft[which], "TPOT": latency.tpot[which]}
    return {f"{part} {kind}": float(of(values)) for part, values in parts.items() for kind, of in kinds.items()}


@dataclass(frozen=True, slots=True)
class EndToEnd:
    """One measured point of an engine in a closed loop.

    Attributes:
        ttft, tpot: seconds, means over requests.
    """

    name: str
    gpu: str
    engine: str
    model: Dimensions
    concurrency: int
    prompt: int
    output: int
    ttft: float
    tpot: float


_MODELS = {
    "Qwen3-32B": "qwen3-32b",
    "Llama-3.1-8B": "llama-3.1-8b",
    "Llama-3.1-70B": "llama-3.1-70b",
}


def end_to_end() -> Iterator[EndToEnd]:
    """Aggregated points of dense models on H100 and H200. Raises `BackendUnavailable` without the package.

    8-bit models of TensorRT-LLM and of NVIDIA's own checkpoints keep their KV in 8 bits as well, others in 16.
    """
    gpus = {folder: gpu for gpu, folder in FOLDERS.items() if gpu != "a100"}
    with (systems() / "silicon_sample.csv").open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            known = next((ours for theirs, ours in _MODELS.items() if theirs in row["model_path"]), None)
            if row["mode"] != "agg" or row["system"] not in gpus or known is None or not row["silicon_tpot_ms"]:
                continue
            if any(int(float(row[name] or 1)) != 1 for name in ("pp_size", "attention_dp_size")):
                continue
            weights = row["gemm_quant_mode"] or "bfloat16"
            small = weights.startswith("fp8")
            short = small and (row["backend"] == "trtllm" or row["model_path"].startswith("nvidia/"))
            stored = "fp8_block" if weights == "fp8_block" else "fp8" if small else "bfloat16"
            base = DIMENSIONS[known + ("-fp8" if small else "")]
            ranks = int(float(row["tp_size"] or 1))
            told = re.search(r"silicon_concurrency=(\d+)", row["silicon_data_source"])
            yield EndToEnd(
                f"{known} {stored} tp{ranks}",
                gpus[row["system"]],
                row["backend"],
                replace(base, weights=stored, kv="fp8" if short else "bfloat16", ranks=ranks),  # type: ignore[arg-type]
                int(told[1]) if told else int(float(row["batch_size"])),
                int(row["isl"]),
                int(row["osl"]),
                float(row["silicon_ttft_ms"]) / 1e3,
                float(row["silicon_tpot_ms"]) / 1e3,
            )


_BUDGETS = {"vllm": 8192, "sglang": 8192, "trtllm": 8192}
"""Tokens of a step at most: each engine's default on these GPUs."""

_ROUNDS = 2
"""Requests of each client of a closed loop that count."""

_USED = 0.9
"""Share of the memory for weights and KV: the engines' default."""


def predict(point: EndToEnd) -> Latency:
    """The closed loop of a point: so many clients, each sending its next request when it has the last answer."""
    model, gpu = point.model, GPUS[point.gpu]
    element = 1 if model.kv == "fp8" else 2
    token = 2 * model.layers * model.kv_width * element
    blocks = int((_USED * gpu.memory_bytes - model.rank.weight_bytes) / (token * _BLOCK))
    cost = SiliconCost(model, point.gpu, engine=point.engine)
    core = _core(model.rank, point.gpu, cost, blocks, max(256, point.concurrency), _BUDGETS[point.engine])
    return closed_loop(core, point.concurrency, point.prompt, point.output, _ROUNDS)


def closed_loop(core: EngineCore, clients: int, prompt: int, output: int, rounds: int) -> Latency:
    """Serve clients that each send their next request when they have the last answer, in the steady state.

    The first answers are cut to even shares of `output`, so that clients are out of step as they are after a while of
    requests of unequal sizes; `rounds` requests of each client after that one count.
    """
    firsts = [max(1, output * (i + 1) // clients) for i in range(clients)]
    lengths = iter([*firsts, *[output] * (clients * rounds)])
    numbers = count()

    def following() -> Request | None:
        length = next(lengths, None)
        if length is None:
            return None
        params = SamplingParams(max_tokens=length, ignore_eos=True)
        return Request(next(numbers), range(prompt), params, _PATIENT, hashes=())

    done: list[Request] = []
    for _ in range(clients):
        core.add(cast("Request", following()))
    while not core.idle:
        for finished in core.turn():
            done.append(finished)
            if (request := following()) is not None:
                core.add(request)
    counted = sorted(done, key=lambda request: request.id)[clients:]
    return _latency([(request.arrival or 0.0, request.times) for request in counted])


def _core(model: ModelShape, gpu: str, cost: Cost, blocks: int, sequences: int, budget: int) -> EngineCore:
    backend = open_backend(f"sim:{gpu}")
    device, splits = backend.device(), backend.splits()
    return EngineCore(
        SimLanes(device, splits, cost, GhostBody),
        make_policy(f"chunked:{budget}", slo=_PATIENT, splits=splits),
        OnlinePredictor(RooflinePrior(model, device)),
        BlockPool(blocks, _BLOCK),
        GhostBoard(sequences, blocks * _BLOCK),
        layers=model.layers,
        lead_s=-math.inf,
    )


def _warming_up(cost: Cost, seconds: float) -> Cost:
    """A cost whose first forward takes longer."""
    first: list[Shape] = []

    def price(shape: Shape, units: int, neighbour: Shape, neighbour_units: int) -> float:
        if not first:
            first.append(shape)
        return cost(shape, units, neighbour, neighbour_units) + (seconds if shape == first[0] else 0.0)

    return price


def _latency(served: Sequence[tuple[float, Sequence[float]]]) -> Latency:
    """Of requests that all got at least two tokens: when each was due and when its tokens came."""
    ttft = [times[0] - due for due, times in served]
    tpot = [(times[-1] - times[0]) / max(1, len(times) - 1) for _, times in served]
    return Latency(np.array(ttft), np.array(tpot))
