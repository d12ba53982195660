"""What the profiler's record shows: nothing copied at the hand-off, no wait of the host in the steady state."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from smpart.bench.gpu_check.record import Figures, Record, Setting, spread
from smpart.bench.gpu_check.rig import Rig
from smpart.bench.gpu_check.trace import Trace
from smpart.bench.probe import even_split
from smpart.engine.core import EngineCore
from smpart.engine.deployment import Deployment
from smpart.engine.request import Request
from smpart.kvcache import KVConfig
from smpart.partition import Side
from smpart.runtime.device.machine import Machine
from smpart.runtime.sampling import SamplingParams
from smpart.scheduler.slo import SLO

_PATIENT = SLO(ttft_ms=1e9, tpot_ms=1e9)
_STEADY = "smpart steady decode"


@dataclass(frozen=True, slots=True)
class Steady:
    """A steady state: so many rows, looked at after so many tokens each, for so many steps."""

    rows: int = 16
    before: int = 16
    steps: int = 64
    after: int = 200
    """Tokens that are left then, even to the request that began first: none ends in the window."""

    @property
    def tokens(self) -> int:
        """Of each request."""
        return self.before + self.steps + self.after


def measure(setting: Setting, record: Record) -> None:
    """A model of a billion weights on two lanes of this process."""
    kv = KVConfig(blocks=1024, max_len=1024, max_requests=32, prefix_cache=False)
    with Rig(setting, "1b", kv) as rig:
        machine = rig.machine()
        record.put(attention=machine.info.notes.get("attention"), lanes=machine.info.notes.get("lanes"))
        try:
            deployment = rig.deployment(machine)
            tokens = 40 if setting.tiny else 512
            serve(deployment, prompts(1, tokens), 6)  # compiles and captures
            blocks_move(deployment, machine, rig, tokens, record)
            nothing_copied(deployment, tokens, rig, record)
            state = Steady(3, 2, 8, 20) if setting.tiny else Steady()
            serve(deployment, prompts(state.rows, 32), state.tokens)
            steady(deployment, state, record)
            no_wait(deployment, state, rig, record)
        finally:
            machine.lanes.close()


def blocks_move(deployment: Deployment, machine: Machine, rig: Rig, tokens: int, record: Record) -> None:
    """One request alone: the block ids it had after prefill it has to its end, and what lies there stays."""
    core = _core(deployment)
    (request,) = _add(core, prompts(1, tokens, seed=1), 6)
    full = tokens // rig.board.block_tokens
    before = after = np.zeros(0, np.int32)
    kept: torch.Tensor | None = None
    while not core.idle:
        core.turn()
        slot = int(core.state.table.slot[0])
        if slot >= 0 and request.token_ids:
            after = rig.board.tables[slot, :full].copy()
            if kept is None:
                before, kept = after, _look(machine, after, rig)
    assert kept is not None
    unchanged = bool(torch.equal(kept, _look(machine, before, rig)))
    storages = {page.untyped_storage().data_ptr() for page in machine.pages}
    record.put(
        blocks=full, same_blocks=bool((before == after).all()), kv_unchanged=unchanged, kv_memories=len(storages)
    )
    record.require(bool((before == after).all()) and unchanged, "the KV of a prompt moved or changed at the hand-off")
    record.require(len(storages) == 1, "the lanes have more than one KV memory")


def nothing_copied(deployment: Deployment, tokens: int, rig: Rig, record: Record) -> None:
    """Bytes copied between the last work of the prefill and the answer of the first step."""
    with _profiled(rig) as profiler:
        serve(deployment, prompts(1, tokens, seed=2), 6)
        rig.settle()
    trace = Trace.of(profiler)
    try:
        copied = trace.copied(*trace.hand_off())
    except LookupError as error:
        record.fault(f"the hand-off cannot be seen: {error}")
        return
    kv = tokens * deployment.model_shape.kv_token_bytes
    record.put(handoff_copied_bytes=copied, request_copied_bytes=trace.copied(), prompt_kv_bytes=kv)
    record.require(copied["DtoD"] == 0, f"{copied['DtoD']} bytes were copied on the device at the hand-off")
    record.require(copied["HtoD"] + copied["DtoH"] < kv, "as much as the prompt's KV went to or from the host")


def steady(deployment: Deployment, state: Steady, record: Record) -> None:
    """Decode steps without a profiler: how long, and how much of the lane's time was a bubble."""
    core = _core(deployment)
    requests = _add(core, prompts(state.rows, 32, seed=3), state.tokens)
    _until(core, requests, state.before)
    first = len(core.log.spans)
    _until(core, requests, state.before + state.steps)
    spans = [span for span in core.log.spans[first:] if span.side is Side.DECODE]
    _drain(core)
    idle = sum(max(0.0, b.started - a.finished) for a, b in pairwise(spans))
    whole = spans[-1].finished - spans[0].started
    record.put(
        steady={
            "rows": state.rows,
            "steps": len(spans),
            "step_ms": spread([1e3 * (span.finished - span.started) for span in spans]),
            "bubble": round(idle / whole, 5) if whole > 0 else None,
            "decision_us": round(1e6 * median(core.log.decision_seconds), 1),
        }
    )


def no_wait(deployment: Deployment, state: Steady, rig: Rig, record: Record) -> None:
    """The same under the profiler: what in the launching thread waited for the device."""
    core = _core(deployment)
    requests = _add(core, prompts(state.rows, 32, seed=4), state.tokens)
    _until(core, requests, state.before)
    with _profiled(rig) as profiler, record_function(_STEADY):
        _until(core, requests, state.before + state.steps)
    _drain(core)
    trace = Trace.of(profiler)
    window = trace.mark(_STEADY)
    waits = trace.waits(window)
    gaps, whole = trace.idle(window)
    figures: Figures = {
        "host_waits": waits,
        "works_on_device": sum(event.within(window.start, window.end) for event in trace.device),
        "copied_bytes": trace.copied(window.start, window.end),
        "bubble_on_device": round(gaps / whole, 5) if whole else None,
    }
    record.put(profiled_steady=figures)
    record.require(bool(figures["works_on_device"]), "the profiler saw no work on a device")
    record.require(not waits, f"the host waited in the steady state: {waits}")


def prompts(count: int, tokens: int, seed: int = 0) -> list[list[int]]:
    """Random prompts."""
    return [[int(t) for t in row] for row in np.random.default_rng(seed).integers(3, 500, (count, tokens))]


def serve(deployment: Deployment, texts: Sequence[Sequence[int]], tokens: int) -> None:
    """Serve prompts that arrive at once to their end."""
    core = _core(deployment)
    _add(core, texts, tokens)
    _drain(core)


def _core(deployment: Deployment) -> EngineCore:
    return deployment.core(even_split(deployment.lanes.splits()), _PATIENT)


def _add(core: EngineCore, texts: Sequence[Sequence[int]], tokens: int) -> list[Request]:
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    requests = [Request(number, text, params, _PATIENT) for number, text in enumerate(texts)]
    for request in requests:
        core.add(request)
    return requests


def _until(core: EngineCore, requests: Sequence[Request], tokens: int) -> None:
    while any(len(request.token_ids) < tokens for request in requests):
        core.turn()


def _drain(core: EngineCore) -> None:
    while not core.idle:
        core.turn()


def _look(machine: Machine, blocks: np.ndarray, rig: Rig) -> torch.Tensor:
    rig.settle()
    with torch.inference_mode():
        ids = torch.from_numpy(blocks.astype(np.int64)).to(rig.parts.where)
        return torch.stack([page[:, ids] for page in machine.pages]).cpu()


def _profiled(rig: Rig) -> AbstractContextManager[profile]:
    cuda = [ProfilerActivity.CUDA] if rig.parts.where.type == "cuda" else []
    return profile(activities=[ProfilerActivity.CPU, *cuda])
