"""The fake MPS control program, in an environment without CUDA's variables."""

import os

import fake_mps as program
import pytest


@pytest.fixture
def fake_mps(monkeypatch):
    for name in [each for each in os.environ if each.startswith("CUDA")]:
        monkeypatch.delenv(name)
    with program.playing() as fake:
        yield fake
