"""End-to-end points that others measured: engines under a closed loop of clients, on H100 and H200."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count
from typing import cast

from smpart.sim import DIMENSIONS, Dimensions
from smpart.sim.dimensions import Weights
from smpart.sim.op_tables import FOLDERS, systems


@dataclass(frozen=True, slots=True)
class EndToEnd:
    """One measured point of an engine in a closed loop.

    Attributes:
        number: its place among all of them.
        source: who measured it, as the file says.
        concurrency: clients, each with one request at a time.
        prompt, output: tokens of a request.
        ttft, tpot: seconds, means over requests.
    """

    number: int
    name: str
    gpu: str
    engine: str
    version: str
    source: str
    model: Dimensions
    concurrency: int
    prompt: int
    output: int
    ttft: float
    tpot: float

    @property
    def together(self) -> bool:
        """Whether all clients began at once with requests of one size.

        The sweeps of AIConfigurator's authors did. The dated tables are of public benchmarks with lengths that vary.
        """
        return _SWEEPS in self.source

    @property
    def fitted_on(self) -> bool:
        """Whether constants may be fitted on it: every other point. The rest are predicted."""
        return self.number % 2 == 0


_SWEEPS = "aic-auto-gap-analysis"

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
    numbers = count()
    with (systems() / "silicon_sample.csv").open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            known = next((ours for theirs, ours in _MODELS.items() if theirs in row["model_path"]), None)
            if row["mode"] != "agg" or row["system"] not in gpus or known is None or not row["silicon_tpot_ms"]:
                continue
            if any(int(float(row[name] or 1)) != 1 for name in ("pp_size", "attention_dp_size")):
                continue
            told = re.search(r"silicon_concurrency=(\d+)", row["silicon_data_source"])
            model = _model(known, row)
            yield EndToEnd(
                next(numbers),
                f"{known} {model.weights} tp{model.ranks}",
                gpus[row["system"]],
                row["backend"],
                row["backend_version"],
                row["silicon_data_source"],
                model,
                int(told[1]) if told else int(float(row["batch_size"])),
                int(row["isl"]),
                int(row["osl"]),
                float(row["silicon_ttft_ms"]) / 1e3,
                float(row["silicon_tpot_ms"]) / 1e3,
            )


def _model(known: str, row: dict[str, str]) -> Dimensions:
    weights = row["gemm_quant_mode"] or "bfloat16"
    small = weights.startswith("fp8")
    short = small and (row["backend"] == "trtllm" or row["model_path"].startswith("nvidia/"))
    stored = weights if weights == "fp8_block" else "fp8" if small else "bfloat16"
    return replace(
        DIMENSIONS[known + ("-fp8" if small else "")],
        weights=cast("Weights", stored),
        kv="fp8" if short else "bfloat16",
        ranks=int(float(row["tp_size"] or 1)),
    )
