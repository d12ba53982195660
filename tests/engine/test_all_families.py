"""Law 3 for every family that is served, on real lanes: random schedules, preemptions, cancels and a killed worker."""

from __future__ import annotations

import pytest
from test_same_tokens import run

from smpart.engine import Deployment
from smpart.kvcache import KVConfig
from smpart.runtime.families import FAMILIES
from smpart.runtime.models import load_model

_REFUSED = {"gemma2", "gpt_oss", "qwen3_next", "mamba", "deepseek_v3", "falcon", "bloom", "mpt", "bart"}


@pytest.mark.slow
@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in _REFUSED])
def test_tokens_of_generate_under_chaos_with_a_kill(family: str) -> None:
    model, _ = load_model(f"random:{family}")
    with Deployment.serve(model, backend="cores", kv=KVConfig(blocks=40, max_len=256, max_requests=8)) as deployment:
        run(deployment, model, seed=11, count=8)
        run(deployment, model, seed=12, kills=1, cancels=0.0, count=6)
