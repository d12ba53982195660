"""The conformance suite on green contexts of a real device."""

from typing import Any

import pytest

pytest.importorskip("cuda.bindings.driver")
from conformance import Case, checks
from on_stream import GreenLanes, OnDevice

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("check", checks, ids=lambda check: check.__name__)
def test_conformance(check: Any) -> None:
    check(Case("green", lambda: GreenLanes(OnDevice), virtual=False))
