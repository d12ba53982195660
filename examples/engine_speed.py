"""How fast the engine decodes, side by side with transformers on the same cores.

One stream against plain ``generate``; eight streams against static-batch ``generate`` and against transformers' own
continuous batching (``generate_batch``). Runs are interleaved, so that a noisy machine is noisy to all alike; ratios
are taken pair by pair, and their median and spread are what counts.

    python examples/engine_speed.py --json
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
from transformers import GenerationConfig, PreTrainedModel

import smpart
from smpart.bench.host import host
from smpart.runtime.models import load_model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tokens", type=int, default=48, help="output tokens of each stream")
    parser.add_argument("--prompt", type=int, default=64, help="prompt tokens of each stream")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--batch", action="store_true", help="also run transformers' generate_batch (slow)")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()

    model, _ = load_model(options.model)
    vocab = model.config.vocab_size
    prompts = torch.randint(5, vocab, (8, options.prompt), generator=torch.Generator().manual_seed(0))
    model.generation_config.eos_token_id = None
    results = []
    with smpart.wrap(model, kv=smpart.KVConfig(max_len=1024, memory_bytes=1 << 30, prefix_cache=False)) as engine:
        cores = engine.deployment.device.units
        torch.set_num_threads(cores)
        for streams in (1, 8):
            batch = prompts[:streams]
            ways: dict[str, Callable[[], float]] = {
                "smpart": lambda batch=batch: served(engine, batch, options.tokens),
                "generate": lambda batch=batch: plain(model, batch, options.tokens),
            }
            if streams == 8 and options.batch:
                ways["generate_batch"] = lambda batch=batch: continuous(model, batch, options.tokens)
            results.append(compare(streams, ways, options.repeat, streams * (options.tokens - 1)))
    record = {"schema": 1, "command": "engine_speed", "host": host(), "model": options.model, "results": results}
    for result in results:
        print(f"{result['streams']} stream(s): " + ", ".join(f"{k} {v:.1f} tok/s" for k, v in result["tok_s"].items()))
        for rival, ratio in result["ratio"].items():
            print(f"  against {rival}: {ratio['median']:.2f}x ({ratio['min']:.2f} to {ratio['max']:.2f})")
    if options.json:
        print(json.dumps(record))


def compare(streams: int, ways: dict[str, Callable[[], float]], repeat: int, tokens: int) -> dict[str, object]:
    """Seconds of decoding, the ways in turn; ratios of speed of the first against the others, run by run."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for run in range(repeat + 1):
        for name, way in ways.items():
            took = way()
            if run:  # the first round warms up
                seconds[name].append(took)
    first, *rivals = ways
    ratios = {r: [b / a for a, b in zip(seconds[first], seconds[r], strict=True)] for r in rivals}
    return {
        "streams": streams,
        "tok_s": {name: tokens / statistics.median(took) for name, took in seconds.items()},
        "seconds": seconds,
        "ratio": {r: {"median": statistics.median(x), "min": min(x), "max": max(x)} for r, x in ratios.items()},
    }


def served(engine: smpart.Engine, batch: torch.Tensor, tokens: int) -> float:
    """Seconds from the last stream's first token to the last token of all."""
    outputs = engine.generate(batch.tolist(), smpart.SamplingParams(max_tokens=tokens, ignore_eos=True))
    return max(o.times.tokens[-1] for o in outputs) - max(o.times.tokens[0] for o in outputs)


class _Clock:
    """A streamer that notes when each token of a batch came."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


@torch.inference_mode()
def plain(model: PreTrainedModel, batch: torch.Tensor, tokens: int) -> float:
    """Seconds that ``generate`` takes from the first output token to the last."""
    if len(batch) == 1:
        clock = _Clock()
        model.generate(batch, max_new_tokens=tokens, do_sample=False, pad_token_id=0, streamer=clock)
        return clock.times[-1] - clock.times[1]  # times[0] is the prompt
    began = time.perf_counter()
    model.generate(batch, max_new_tokens=1, do_sample=False, pad_token_id=0)
    first = time.perf_counter()
    model.generate(batch, max_new_tokens=tokens, do_sample=False, pad_token_id=0)
    return time.perf_counter() - first - (first - began)


@torch.inference_mode()
def continuous(model: PreTrainedModel, batch: torch.Tensor, tokens: int) -> float:
    """Seconds that ``generate_batch`` takes for the whole answer, less those for one token."""

    def run(count: int) -> float:
        config = GenerationConfig(max_new_tokens=count, do_sample=False, pad_token_id=0, eos_token_id=-1)
        began = time.perf_counter()
        model.generate_batch([row.tolist() for row in batch], generation_config=config, progress_bar=False)
        return time.perf_counter() - began

    return run(tokens) - run(1)


if __name__ == "__main__":
    main()
