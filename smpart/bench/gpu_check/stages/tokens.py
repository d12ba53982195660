"""Law 3 on the device's own process: the tokens of plain `generate`, whatever is resized, and whoever dies.

In fp32 they are equal. In bf16 each token is the likeliest by plain `forward` on our own output, or within twice the
noise that plain `forward` shows between batch sizes.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from smpart.bench.gpu_check.record import CUDA, Figures, Record, Setting
from smpart.bench.gpu_check.repository import tests
from smpart.bench.gpu_check.rig import chosen, random_llama
from smpart.engine.core import EngineCore
from smpart.engine.deployment import Deployment
from smpart.engine.real import deploy_real
from smpart.engine.request import Request
from smpart.engine.staff import on_gpu
from smpart.kvcache import KVConfig
from smpart.partition import Side
from smpart.partition.green import Green
from smpart.runtime.families import random_model
from smpart.runtime.processes import ProcessLanes
from smpart.runtime.sampling import SamplingParams
from smpart.scheduler.slo import SLO

_TIGHT = SLO(ttft_ms=50, tpot_ms=5)
_BATCHES = (2, 4, 8)


@dataclass(frozen=True, slots=True)
class Served:
    """Requests that a policy has served to their end."""

    requests: Sequence[Request]
    resizes: int
    splits: int


def measure(setting: Setting, record: Record) -> None:
    """Exact in fp32 on a tiny model, then bf16 on a large one."""
    tests("engine")
    exact(setting, record)
    if record.left() > 15.0:
        low_precision(setting, record)
    else:
        record.put(bf16={"left_out": f"{record.left():.0f} s were left"})


def deploy(model: PreTrainedModel, kv: KVConfig, setting: Setting) -> Deployment:
    """The model on the device's own process, as `Deployment.serve` places it."""
    hire = partial(on_gpu, parts=setting.parts)
    return deploy_real(model, None, Green(), kv, name=type(model).__name__, hire=hire)


def exact(setting: Setting, record: Record) -> None:
    """Random schedules, smpart's own, and one in which the device's process is killed."""
    chaos = importlib.import_module("chaos")
    model = random_model("llama")
    runs: list[Figures] = []
    with deploy(model, KVConfig(max_len=256, blocks=40, max_requests=8), setting) as deployment:
        policies: list[tuple[str, Any, bool]] = [
            ("random 0", chaos.Chaos(setting.seed), False),
            ("smpart", "smpart", False),
            ("random 1", chaos.Chaos(setting.seed + 1), False),
            ("random, killed once", chaos.Chaos(setting.seed + 2), True),
        ]
        for number, (name, policy, kill) in enumerate(policies[2:] if setting.tiny else policies):
            texts = chaos.prompts(np.random.default_rng([setting.seed, number]), 4 if setting.tiny else 10, 150)
            served = serve(deployment, policy, texts, 12, kill=kill)
            differ = [r.id for r in served.requests if r.token_ids != reference(model, list(r.prompt), 12)]
            runs.append({"policy": name, "requests": len(texts), "equal": len(texts) - len(differ)} | _moves(served))
            record.put(fp32=runs)
            record.require(not differ, f"fp32, {name}: requests {differ} differ from plain generate")


def low_precision(setting: Setting, record: Record) -> None:
    """bf16 at full size, teacher-forced."""
    chaos = importlib.import_module("chaos")
    where = torch.device("cuda", 0) if setting.parts == CUDA else torch.device("cpu")
    plain = random_llama(chosen(setting, "1b"), torch.bfloat16, where, setting.seed)
    count, longest, new = (2, 40, 5) if setting.tiny else (8, 600, 32)
    texts = chaos.prompts(np.random.default_rng(setting.seed), count, longest)
    kv = KVConfig(max_len=1024, blocks=1024, max_requests=16)
    with deploy(copy.deepcopy(plain).to("cpu"), kv, setting) as deployment:  # type: ignore[arg-type]
        served = [serve(deployment, policy, texts, new) for policy in (chaos.Chaos(setting.seed), "smpart")]
    requests = [request for each in served for request in each.requests]
    short, noise = 0.0, 0.0
    for request in requests:
        one, other = teacher_forced(plain, list(request.prompt), request.token_ids, where)
        short, noise = max(short, one), max(noise, other)
    flips = sum(r.token_ids != reference(plain, list(r.prompt), new) for r in requests)
    figures: Figures = {
        "requests": len(requests),
        "tokens": new * len(requests),
        "most_below_likeliest": round(short, 5),
        "noise_of_plain_forward": round(noise, 5),
        "answers_unlike_generate": flips,
    }
    record.put(bf16=figures | _moves(served[0]))
    record.require(short <= 2 * noise, f"bf16: a token is {short:.4f} below the likeliest; the noise is {noise:.4f}")


def serve(deployment: Deployment, policy: Any, texts: Sequence[list[int]], new: int, *, kill: bool = False) -> Served:
    """Serve prompts that come one at each turn; `kill`: end the device's process once, in the middle."""
    core = deployment.core(policy, _TIGHT)
    params = SamplingParams(max_tokens=new, ignore_eos=True)
    requests = [Request(number, text, params, _TIGHT) for number, text in enumerate(texts)]
    for request in requests:
        core.add(request)
        core.turn(core.now())
    turns = 0
    while not core.idle:
        core.turn()
        turns += 1
        if kill and turns == 20:
            _kill(core)
    return Served(requests, core.log.resizes, len({span.split for span in core.log.spans}))


def reference(model: PreTrainedModel, prompt: list[int], new: int) -> list[int]:
    """What plain `generate` answers."""
    assert model.generation_config is not None
    model.generation_config.eos_token_id = None
    ids = torch.tensor([prompt], device=model.device)
    with torch.inference_mode():
        answer: Any = model.generate(ids, max_new_tokens=new, do_sample=False, pad_token_id=0)  # type: ignore[operator]
    return [int(token) for token in answer[0, len(prompt) :]]


def teacher_forced(
    model: PreTrainedModel, prompt: list[int], output: Sequence[int], where: torch.device
) -> tuple[float, float]:
    """How far a token's logit is below the likeliest at most, and how far logits differ between batch sizes."""
    ids = torch.tensor([[*prompt, *output]], device=where)
    at = slice(len(prompt) - 1, len(prompt) - 1 + len(output))
    with torch.inference_mode():
        alone = model(ids).logits[0, at].float()
        noise = max(float((model(ids.repeat(n, 1)).logits[n // 2, at].float() - alone).abs().max()) for n in _BATCHES)
    taken = alone.gather(1, torch.tensor(list(output), device=where)[:, None])[:, 0]
    return float((alone.max(dim=1).values - taken).max()), noise


def _kill(core: EngineCore) -> None:
    lanes = core.lanes
    assert isinstance(lanes, ProcessLanes)
    pid = lanes.pid(Side.DECODE)
    if pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _moves(served: Served) -> Figures:
    return {"resizes": served.resizes, "splits_used": served.splits}
