"""A model served under MPS: a holder and workers in processes of their own, over a fake driver and a fake daemon."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import fake_mps
import pytest
from fake_cuda import Fake
from fake_mps import FakeMps
from test_same_tokens import run

from smpart.engine import Deployment
from smpart.engine.real import deploy_real, warm_up
from smpart.engine.staff import on_mps
from smpart.kvcache import KVConfig
from smpart.partition import Split
from smpart.partition.mps import Mps
from smpart.runtime.models import load_model

pytestmark = pytest.mark.drivers("13.0")

SPLITS = [Split(40, 92), Split(96, 36)]


@pytest.fixture(scope="module")
def daemons() -> Iterator[FakeMps]:
    """Workers do not carry the program's variables: they are forked from a process that was started before."""
    warm_up()
    with fake_mps.playing() as fake, pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", str(fake.base))
        yield fake


def deploy(
    model: Any, daemons: FakeMps, glue: str = "open_glue", kv: KVConfig | None = None, **options: Any
) -> Deployment:
    kv = kv or KVConfig(max_len=256, blocks=40, max_requests=8)
    mps = Mps(program=daemons.program)
    hire = partial(on_mps, splits=SPLITS, glue=f"fake_clients:{glue}", **options)
    return deploy_real(model, None, mps, kv, name="llama", hire=hire)


@pytest.fixture(scope="module")
def served(driver: Fake, daemons: FakeMps) -> Iterator[tuple[Any, Deployment]]:
    driver.reset()
    model, _ = load_model("random:llama")
    with deploy(model, daemons) as deployment:
        yield model, deployment


@pytest.mark.parametrize("seed", range(2))
def test_any_schedule_gives_the_tokens_of_generate(served: Any, seed: int) -> None:
    model, deployment = served
    run(deployment, model, seed)
