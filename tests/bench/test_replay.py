from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from smpart.bench.replay import Job, replay
from smpart.engine.request import FinishReason
from smpart.errors import SmpartError
from smpart.runtime.sampling import SamplingParams
from smpart.scheduler.slo import SLO

OBJECTIVES = SLO(ttft_ms=1000, tpot_ms=100)


def jobs(*dues: float, prompt: int = 10, output: int = 3) -> list[Job]:
    return [Job(t, range(prompt), SamplingParams(max_tokens=output), ()) for t in dues]


def test_times_by_hand(fake_core: Any) -> None:
    """1 s to a first token, 0.5 s to each further one, one request at a time."""
    result = replay(fake_core(1.0, 0.5), jobs(0.0, 0.25, 10.0), OBJECTIVES)
    assert [s.times_s for s in result.served] == [(1.0, 1.5, 2.0), (3.0, 3.5, 4.0), (11.0, 11.5, 12.0)]
    assert result.seconds == 12.0 and result.started == 100.0
    assert all(s.reason is FinishReason.LENGTH and s.token_ids == (7, 7, 7) for s in result.served)


def test_requests_are_added_when_due_and_not_before(fake_core: Any) -> None:
    core = fake_core(1.0, 0.5)
    replay(core, jobs(0.0, 0.3, 0.3, 7.0), OBJECTIVES)
    assert core.added == [(100.0, 0), (pytest.approx(100.3), 1), (pytest.approx(100.3), 2), (107.0, 3)]


def test_a_request_that_cannot_be_served_is_refused_and_costs_the_others_nothing(fake_core: Any) -> None:
    mixed = [*jobs(0.0), *jobs(0.1, prompt=5000), *jobs(0.2)]
    result = replay(fake_core(1.0, 0.5), mixed, OBJECTIVES)
    alone = replay(fake_core(1.0, 0.5), [mixed[0], mixed[2]], OBJECTIVES)
    assert [s.reason for s in result.served] == [FinishReason.LENGTH, FinishReason.REFUSED, FinishReason.LENGTH]
    assert result.served[1].error == "too long" and not result.served[1].finished
    assert [result.served[i].times_s for i in (0, 2)] == [s.times_s for s in alone.served]


def test_status_counts_up_to_all(fake_core: Any) -> None:
    seen = []
    replay(fake_core(1.0, 0.5), [*jobs(0.0, 1.0), *jobs(2.0, prompt=5000)], OBJECTIVES, seen.append)
    assert (seen[-1].arrived, seen[-1].ended, seen[-1].total) == (3, 3, 3)
    assert all(a.ended <= b.ended and a.ended <= a.arrived for a, b in pairwise(seen))


def test_an_interrupt_cancels_everything_first(fake_core: Any) -> None:
    core = fake_core(1.0, 0.5)
    core.interrupt_at = 101.2
    with pytest.raises(KeyboardInterrupt):
        replay(core, jobs(0.0, 0.1, 50.0), OBJECTIVES)
    assert core.idle and core.now() < 102


def test_a_core_that_stands_still_is_reported(fake_core: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("smpart.bench.replay._STUCK_TURNS", 20)
    core = fake_core(1.0, 0.5)
    core.turn = lambda until=None: []
    with pytest.raises(SmpartError, match="1 requests are left"):
        replay(core, jobs(0.0), OBJECTIVES)
