"""Who shares a forward: its first tokens all come when it ends."""

from __future__ import annotations

import pytest

from smpart.scheduler.backlog import Turns, backlog
from smpart.scheduler.costs import Costs
from smpart.scheduler.packing import OVER, Room, pack
from tests.scheduler.still import begun, still, waiting

ROOM = Room(10_000, 10_000, 64)
LONG = 6000


def packed(rows: list[dict], *, enough: float = 4096, speed: float = 1.0) -> list[int]:
    """Prompt lengths of the forward that starts with these rows; all may be in it as far as blocks and tokens go."""
    snapshot = still(rows)
    costs = Costs()
    costs.tick(snapshot.predictor, snapshot.units)
    line = backlog(snapshot, costs, Turns(), 0.0, speed, 10.0)
    return [piece.length for piece in pack(snapshot, line, ROOM, 100_000, enough, speed).pieces]


def seconds(*lengths: int) -> float:
    snapshot = still([waiting(8)])
    costs = Costs()
    costs.tick(snapshot.predictor, snapshot.units)
    return sum(costs.work_of(length) for length in lengths)


def test_short_prompts_share_a_forward() -> None:
    rows = [waiting(n, arrival=0.9, ttft_deadline=2.0) for n in (300, 400, 500)]
    assert packed(rows) == [300, 400, 500]


def test_a_prompt_that_is_late_anyway_does_not_make_others_late() -> None:
    due = 1.0 + seconds(300, 400) + 0.2 * seconds(LONG)
    short = [waiting(n, arrival=0.9, ttft_deadline=due) for n in (300, 400)]
    late = waiting(LONG, arrival=0.1, ttft_deadline=0.9)
    assert packed([late, *short], enough=100_000) == [300, 400]
    patient = [row | {"ttft_deadline": due + seconds(LONG)} for row in short]
    assert packed([late, *patient], enough=100_000) == [300, 400, LONG]


def test_whoever_is_lost_together_is_served_together() -> None:
    rows = [waiting(n, arrival=0.1, ttft_deadline=0.5) for n in (300, LONG, 400)]
    assert packed(rows, enough=100_000) == [300, LONG, 400]


@pytest.mark.parametrize("enough", [512, 2048])
def test_a_saturated_forward_gains_nothing_from_company(enough: int) -> None:
    rows = [waiting(enough // 2, arrival=0.9, ttft_deadline=9.0), waiting(LONG, arrival=0.9, ttft_deadline=9.1)]
    assert packed(rows, enough=enough) == [enough // 2]
    assert OVER * enough < LONG


def test_a_prompt_that_was_begun_goes_on_with_whoever_leads() -> None:
    rows = [waiting(300, arrival=0.9, ttft_deadline=1.0 + 1.5 * seconds(300)), begun(LONG, 100, ttft_deadline=9.0)]
    assert packed(rows) == [300, LONG - 100]
