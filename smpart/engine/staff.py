"""Who serves a model on a device: the worker processes, and the memory they share with the engine."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from smpart.errors import BackendUnavailable
from smpart.kvcache import KVConfig, KVLayout, pool_blocks
from smpart.partition import Backend
from smpart.partition.cores import Cores
from smpart.partition.green import Green
from smpart.partition.mps import Mps
from smpart.partition.split import Split
from smpart.runtime.board import Board
from smpart.runtime.crew import CoreCrew, Crew
from smpart.runtime.device.crew import DeviceCrew
from smpart.runtime.device.machine import DeviceArgs
from smpart.runtime.facts import ModelFacts
from smpart.runtime.model_worker import MODEL_BODY, ModelArgs
from smpart.runtime.mps.crew import MpsCrew
from smpart.runtime.segments import SharedSegment
from smpart.runtime.sharing import SharedModel


@dataclass(frozen=True, slots=True)
class Job:
    """A model to be served.

    Attributes:
        layout: of its KV memory.
        max_len: longest prompt and answer together.
    """

    weights: SharedModel
    facts: ModelFacts
    layout: KVLayout
    kv: KVConfig
    max_len: int


@dataclass(frozen=True, slots=True)
class Staff:
    """Workers that can be started.

    Attributes:
        segments: the memory they share with the engine: ``weights``, ``board``, and on a CPU ``kv``.
        blocks: KV blocks there are, once the workers are ready.
    """

    crew: Crew
    segments: dict[str, SharedSegment]
    blocks: Callable[[], int]


Hire = Callable[[Job, Backend, contextlib.ExitStack], Staff]


def why_no_model(backend: Backend) -> str | None:
    """None if models can run on a backend that is usable itself; otherwise what is missing, and what would help."""
    if isinstance(backend, Green | Mps) and torch.version.cuda is None:
        return "this torch is a build for CPUs: install one for CUDA (pip install torch, on Linux)"
    return None


def hire(job: Job, backend: Backend, resources: contextlib.ExitStack) -> Staff:
    """The staff for a backend. Memory made here is given back with `resources`.

    Raises:
        BackendUnavailable: no model can be run there.
        UsageError, SmpartError: the KV memory does not fit.
    """
    why = why_no_model(backend)
    if why is not None:
        raise BackendUnavailable(f"backend {backend.name}: {why}")
    if isinstance(backend, Cores):
        return _on_cores(job, backend, resources)
    if isinstance(backend, Green):
        return on_gpu(job, backend, resources)
    if isinstance(backend, Mps):
        return on_mps(job, backend, resources)
    raise BackendUnavailable(f"backend {backend.name!r} runs no model; use auto, green, mps or cores")


def on_gpu(job: Job, backend: Backend, resources: contextlib.ExitStack, **options: str) -> Staff:
    """One process that holds the device, with its own KV memory there; `options` as in `DeviceArgs`."""
    crew = DeviceCrew(backend.device(), _device_args(job, **options))
    return Staff(crew, {"weights": job.weights.segment, "board": _board(job, resources)}, lambda: crew.blocks)


def on_mps(
    job: Job, backend: Mps, resources: contextlib.ExitStack, splits: Sequence[Split] | None = None, **options: str
) -> Staff:
    """A holder of the memory and a worker a share, under a daemon that runs as long; `options` as in `MpsCrew`."""
    backend.start()
    resources.callback(backend.stop)
    crew = MpsCrew(backend, _device_args(job), splits, **options)
    resources.callback(crew.close)
    return Staff(crew, {"weights": job.weights.segment, "board": _board(job, resources)}, lambda: crew.blocks)


def _device_args(job: Job, **options: str) -> DeviceArgs:
    return DeviceArgs(job.weights.dump(), job.facts, job.layout, job.kv, job.max_len, **options)  # type: ignore[arg-type]


def _on_cores(job: Job, backend: Cores, resources: contextlib.ExitStack) -> Staff:
    """One process a lane, over one KV memory."""
    device = backend.device()
    blocks = pool_blocks(job.kv, job.layout, job.max_len, device.memory_bytes)
    memory = SharedSegment.create(job.layout.total_bytes(blocks), "kv")
    resources.callback(memory.close)
    segments = {"weights": job.weights.segment, "kv": memory, "board": _board(job, resources)}
    args = ModelArgs(job.weights.dump(), job.facts, job.layout, blocks, job.kv.max_requests, job.max_len)
    crew = CoreCrew(device, backend.splits(), MODEL_BODY, backend.placement(overlap=True), args)
    return Staff(crew, segments, lambda: blocks)


def _board(job: Job, resources: contextlib.ExitStack) -> SharedSegment:
    board = SharedSegment.create(Board.size(job.kv.max_requests, job.max_len, job.kv.block_tokens), "board")
    resources.callback(board.close)
    return board
