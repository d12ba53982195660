"""Chunked prefill against smpart on one bursty load, on the device's own process."""

from __future__ import annotations

import torch

from smpart.bench.bench import Bench, Options, unwatched
from smpart.bench.crew import Alone
from smpart.bench.gpu_check.record import CUDA, Figures, Record, Setting
from smpart.bench.gpu_check.rig import chosen, random_llama
from smpart.bench.gpu_check.stages.tokens import deploy
from smpart.bench.source import TraceOptions
from smpart.kvcache import KVConfig

_TRACE = "synth:chat:bursty"
_REQUESTS = 120
_REPEATS = 2
"""The first captures the graphs that the second has."""


def measure(setting: Setting, record: Record) -> None:
    """Both policies in turns, on the same load, at the same objectives, fitted to this device."""
    where = torch.device("cuda", 0) if setting.parts == CUDA else torch.device("cpu")
    model = random_llama(chosen(setting, "1b"), torch.bfloat16, where, setting.seed).to("cpu")  # type: ignore[arg-type]
    if where.type == "cuda":
        torch.cuda.empty_cache()
    tiny = setting.tiny
    kv = KVConfig(max_len=256, blocks=128, max_requests=8) if tiny else KVConfig(max_len=3072, blocks=12288)
    source = TraceOptions(_TRACE, limit=6 if tiny else _REQUESTS, seed=setting.seed)
    options = Options(("chunked", "smpart"), source, repeat=1 if tiny else _REPEATS)
    said: list[str] = []
    runs: list[Figures] = []
    with deploy(model, kv, setting) as deployment:
        bench = Bench(deployment, options, lambda line: _say(record, said, line), unwatched)
        for run in Alone(bench, lambda line: _say(record, said, line)).runs(bench.tasks()):
            runs.append(run.record)
            record.put(runs=runs, **compare(runs))
    record.require(len(runs) == 2 * options.repeat, f"{len(runs)} runs were done")


def compare(runs: list[Figures]) -> Figures:
    """The last run of each policy, side by side."""
    last = {str(run["policy"]): run for run in runs}
    if len(last) < 2:
        return {}
    names = ("ttft_ms", "itl_ms", "tpot_ms", "goodput_rps", "slo_attainment", "bubble", "resizes", "throughput_tok_s")
    return {"side_by_side": {name: {policy: run[name] for policy, run in last.items()} for name in names}}


def _say(record: Record, said: list[str], line: str) -> None:
    said.append(line)
    record.put(said=said)
