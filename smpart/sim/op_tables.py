"""The measured op tables of the package ``aiconfigurator-core`` (Apache-2.0), by GPU and engine."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from smpart.errors import BackendUnavailable

Columns = dict[str, NDArray[Any]]

FOLDERS = {"a100": "a100_sxm", "h100": "h100_sxm", "h200": "h200_sxm"}
"""The package's name of each GPU."""

ENGINES = ("vllm", "sglang", "trtllm")
"""Engines whose kernels were timed."""


def systems() -> Path:
    """The package's folder of measurements. Raises `BackendUnavailable` without the package."""
    spec = find_spec("aiconfigurator_core")
    if spec is None or spec.origin is None:
        raise BackendUnavailable(
            "measured op timings need aiconfigurator-core: pip install 'smpart[sim]' (sim:<gpu>-roofline needs none)"
        )
    return Path(spec.origin).parent / "systems"


def newest(system: str, kind: str, engine: str, file: str) -> Path:
    """A file of the newest version of an engine that has it; `system` as the package names it.

    Raises:
        BackendUnavailable: there is none.
    """
    found = (systems() / "data" / system / kind / engine).glob(f"*/{file}")
    best = max(found, key=lambda path: _version(path.parent.name), default=None)
    if best is None:
        raise BackendUnavailable(f"aiconfigurator-core holds no {kind} timings of {system} under {engine}")
    return best


def read(path: Path, columns: Sequence[str], filters: Sequence[tuple[str, str, Any]] = ()) -> Columns:
    """Some columns of the rows that pass all filters; a column that a table lacks is all 0.

    Raises:
        BackendUnavailable: without pyarrow.
    """
    try:
        import pyarrow.parquet as parquet
    except ImportError:
        raise BackendUnavailable("measured op timings need pyarrow: pip install 'smpart[sim,profile]'") from None
    held = set(parquet.read_schema(path).names)
    kept = [name for name in columns if name in held]
    table = parquet.read_table(path, columns=kept, filters=list(filters) or None, use_threads=False)
    lacking = np.zeros(table.num_rows, dtype=np.int64)
    return {name: np.asarray(table[name].to_numpy()) if name in held else lacking for name in columns}


@cache
def distinct(path: Path, column: str) -> NDArray[Any]:
    """Distinct values of a column, rising."""
    return np.unique(read(path, [column])[column])


def _version(name: str) -> list[int]:
    return [int("".join(filter(str.isdigit, part)) or 0) for part in name.split(".")]
