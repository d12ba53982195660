"""Tests against the fake driver are collected only where an option names its version: see on_fake/."""

from pathlib import Path

import pytest

ON_FAKE = Path(__file__).with_name("on_fake")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fake-driver", metavar="VERSION", help="run tests/cuda/on_fake against a fake driver: 13.0")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Without the option, nothing here may load a libcuda into the process of the other tests."""
    fake_wanted = config.getoption("--fake-driver", default=None)
    return True if collection_path == ON_FAKE and not fake_wanted else None
