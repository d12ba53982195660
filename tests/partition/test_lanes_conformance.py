"""The conformance suite on the lanes that live in this room."""

import sys
from pathlib import Path

import pytest

from smpart.partition import Shape, open_backend
from smpart.partition.cores import Cores, ThreadPlacement
from smpart.partition.sim import SimLanes
from smpart.partition.threads import ThreadLanes

sys.path.insert(0, str(Path(__file__).parent))
from conformance import Case, ToyBody, checks

sys.path.pop(0)


def thread_lanes() -> ThreadLanes:
    backend = open_backend("cores")
    assert isinstance(backend, Cores)
    placement = ThreadPlacement(backend.placement(), set_num_threads=lambda count: None)
    return ThreadLanes(backend.device(), backend.splits(), ToyBody, placement)


def sim_lanes() -> SimLanes:
    def cost(shape: Shape, units: int, neighbour: Shape, neighbour_units: int) -> float:
        return shape.tokens / units * (1.5 if neighbour_units else 1.0)

    backend = open_backend("sim:h100")
    return SimLanes(backend.device(), backend.splits(), cost, ToyBody)


CASES = [Case("threads", thread_lanes, virtual=False), Case("sim", sim_lanes, virtual=True)]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("check", checks, ids=lambda check: check.__name__)
def test_conformance(check, case):
    check(case)
