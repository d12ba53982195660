"""Opening backends by name."""

import logging

import pytest

from smpart.errors import BackendUnavailable, UsageError
from smpart.partition import Backend, Side, Split, backends, open_backend, registry
from smpart.partition.gpus import GPUS


class Stand:
    """A backend of a kind that there is none of yet."""

    name = "stand"

    def __init__(self, why=None):
        self._why = why

    def device(self):
        return open_backend("cores").device()

    def splits(self):
        return ()

    def why_unusable(self):
        return self._why


@pytest.fixture
def own_entries(monkeypatch):
    """Lets a test register what it likes."""
    backends()
    monkeypatch.setattr(registry, "_ENTRIES", dict(registry._ENTRIES))


@pytest.mark.parametrize("spec", ["cores", *(f"sim:{gpu}" for gpu in GPUS)])
def test_every_backend_keeps_the_contract(spec):
    backend = open_backend(spec)
    assert isinstance(backend, Backend)
    assert backend.name == spec
    device, splits = backend.device(), backend.splits()
    assert backend.why_unusable() is None
    assert device.kind in ("cpu", "sim")
    assert list(splits) == sorted(splits)
    assert splits[0] == Split(0, device.units) and splits[-1] == Split(device.units, 0)
    for split in splits:
        sides = [set(split.indices(side, device.units)) for side in Side]
        assert not sides[0] & sides[1] and len(sides[0] | sides[1]) == device.units


@pytest.mark.parametrize("spec", ["cuda", "", "os", "line", "registry", "../cores", "SIM:h100"])
def test_an_unknown_name_lists_the_known_ones(spec):
    with pytest.raises(UsageError, match=r"unknown; there are auto, .*cores") as raised:
        open_backend(spec)
    assert "sim:h100" in str(raised.value)


@pytest.mark.parametrize(("spec", "hint"), [("sim", "sim:h100"), ("sim:b300", "sim:h100"), ("cores:4", "write cores")])
def test_a_wrong_argument_says_what_to_write(spec, hint):
    with pytest.raises(UsageError, match=hint):
        open_backend(spec)


def test_auto_logs_why(caplog):
    with caplog.at_level(logging.INFO, logger="smpart"):
        name = open_backend("auto").name
    assert f"{name} is the best that works here" in caplog.text
    # Every better one has a reason: no driver, or an old one.
    assert all(f"{better}: " in caplog.text for better in ("green", "mps")) or name in ("green", "mps")


def test_auto_takes_the_highest_rank_that_works(own_entries, caplog):
    registry.register("better", kind="cuda", rank=50)(lambda argument: Stand())
    registry.register("best", kind="cuda", rank=90)(lambda argument: Stand("needs driver 570"))
    registry.register("manual", kind="cuda", rank=None)(lambda argument: Stand())
    with caplog.at_level(logging.INFO, logger="smpart"):
        assert isinstance(open_backend("auto"), Stand)
    assert "needs driver 570" in caplog.text
    assert backends("cuda") == ("best", "better", "green", "manual", "mps")


def test_auto_with_nothing_usable_says_why(own_entries):
    registry.register("cores", kind="cpu", rank=10)(lambda argument: Stand("no cores today"))
    with pytest.raises(BackendUnavailable, match=r"no cores today.*sim:<gpu>"):
        open_backend("auto")


def test_backends_by_the_kind_of_device_they_split():
    assert backends("cuda") == ("green", "mps") and backends("cpu") == ("cores",) and backends("sim") == ("sim",)


def test_an_empty_argument_is_spelled_without_a_colon():
    with pytest.raises(UsageError, match=r"there are .*\bmps, mps:"):
        open_backend("nvlink")
    with pytest.raises(UsageError, match=r"write mps, mps:"):
        open_backend("mps:often")
