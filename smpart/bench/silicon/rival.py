"""What AIConfigurator itself estimates for a measured point: the same op tables under its own closed formulas."""

from __future__ import annotations

import logging
from functools import cache
from typing import Any, NamedTuple

from smpart.bench.silicon.points import EndToEnd
from smpart.sim import Dimensions
from smpart.sim.op_tables import FOLDERS, systems

_PATHS = {
    "llama-3.1-8b": "meta-llama/Meta-Llama-3.1-8B",
    "llama-3.1-70b": "meta-llama/Meta-Llama-3.1-70B",
    "qwen3-32b": "Qwen/Qwen3-32B",
}
"""The package's own copies of these models' configurations."""


class Estimate(NamedTuple):
    """Seconds, means over requests."""

    ttft: float
    tpot: float


def estimate(point: EndToEnd) -> Estimate:
    """Its aggregated estimate at the point's batch size, a whole prompt in each mixed step.

    Raises:
        BackendUnavailable: the package is not installed.
    """
    systems()
    from aiconfigurator_core.sdk.config import RuntimeConfig

    name = point.name.split()[0]
    model, database, backend = _made(name, point.model, point.gpu, point.engine)
    wanted = RuntimeConfig(batch_size=point.concurrency, isl=point.prompt, osl=point.output)
    found = backend.run_agg(model, database, wanted, ctx_tokens=point.prompt).get_result_dict()
    return Estimate(float(found["ttft"]) / 1e3, float(found["tpot"]) / 1e3)


@cache
def _made(name: str, model: Dimensions, gpu: str, engine: str) -> tuple[Any, Any, Any]:
    """Its model, database and backend."""
    from aiconfigurator_core.sdk.backends.factory import get_backend
    from aiconfigurator_core.sdk.config_builders import build_model_config
    from aiconfigurator_core.sdk.models import get_model
    from aiconfigurator_core.sdk.perf_database import get_database

    logging.getLogger("aiconfigurator_core").setLevel(logging.ERROR)  # it warns of tables that dense models never use
    config = build_model_config(model.ranks, 1, 1, 1, 1, gemm_quant_mode=model.weights, kvcache_quant_mode=model.kv)
    return get_model(_PATHS[name], config, engine), get_database(FOLDERS[gpu], engine, "current"), get_backend(engine)
