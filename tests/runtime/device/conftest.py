"""Helper modules beside the tests, importable here as in the processes that tests start; a stand-in for FlashInfer."""

import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest

sys.path.append(str(Path(__file__).parent))


@pytest.fixture
def flashinfer(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The package `flashinfer`, as if it were installed."""
    import fake_flashinfer

    monkeypatch.setattr(fake_flashinfer, "__spec__", ModuleSpec("flashinfer", None))
    monkeypatch.setitem(sys.modules, "flashinfer", fake_flashinfer)
    return fake_flashinfer
