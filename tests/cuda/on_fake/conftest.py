"""Tests that run against the fake driver: one process a driver version, named by ``--fake-driver``.

``fake`` is its control panel, reset before each test; after it, nothing may have been misused or left alive.
A test that breaks rules on purpose takes the records (``fake.take_misuse()``), one that leaves things behind says so
(``fake.excuse_live()``).
"""

from collections.abc import Iterator
from typing import Any

import fake_cuda
import pytest
from fake_cuda import Fake

_fake = pytest.StashKey[Fake]()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "drivers(*versions): runs on these versions of the fake driver; default 13.0, 13.1"
    )
    config.stash[_fake] = fake_cuda.load(config.getoption("--fake-driver"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is not for this driver version."""
    version = config.stash[_fake].driver
    kept, dropped = [], []
    for item in items:
        marker = item.get_closest_marker("drivers")
        versions = marker.args if marker else ("13.0", "13.1")
        (kept if version in versions else dropped).append(item)
    items[:] = kept
    config.hook.pytest_deselected(items=dropped)


@pytest.fixture(scope="session")
def driver(pytestconfig: pytest.Config) -> Fake:
    """The fake, initialised, with the reference to the primary context that ``cuda.core`` keeps already taken."""
    from cuda.bindings import driver as cu

    fake = pytestconfig.stash[_fake]
    cu.cuInit(0)
    if float(fake.driver) >= 13:  # this cuda.core warns of older ones
        from cuda.core import Device

        Device(0).set_current()
    return fake


@pytest.fixture
def fake(driver: Fake) -> Iterator[Fake]:
    """The fake driver, playing an H200; call ``fake.reset(gpu=...)`` first for another one."""
    driver.reset()
    yield driver
    misuse, live, excused = driver.misuse(), driver.live(), driver.live_excused
    driver.reset()
    assert misuse == []
    assert excused or live == {}


@pytest.fixture
def primary(fake: Fake) -> Iterator[Any]:
    """The primary context, retained and current."""
    from cuda.bindings import driver as cu
    from cuda_calls import ok

    ok(cu.cuInit(0))
    context = ok(cu.cuDevicePrimaryCtxRetain(0))
    ok(cu.cuCtxSetCurrent(context))
    yield context
    ok(cu.cuCtxSetCurrent(cu.CUcontext(0)))
    ok(cu.cuDevicePrimaryCtxRelease(0))


@pytest.fixture
def lanes(primary: Any) -> Iterator[Any]:
    """Both sides of one split (`cuda_calls.Lanes`); the test must leave them drained."""
    from cuda_calls import Lanes

    made = Lanes()
    yield made
    made.close()
