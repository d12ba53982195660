"""Replays that are cut short: only those that cannot be saved."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from smpart.bench.capacity import hopeless_below
from smpart.bench.metrics import attainment
from smpart.bench.prospect import Prospect
from smpart.bench.replay import Job, Replay, replay
from smpart.engine.request import FinishReason
from smpart.runtime.sampling import SamplingParams
from smpart.scheduler.slo import SLO

SERIAL = SLO(ttft_ms=2000, tpot_ms=600)


def jobs(dues: Iterable[float], outputs: Iterable[int], best_effort: Iterable[int] = ()) -> list[Job]:
    return [
        Job(t, range(10), SamplingParams(max_tokens=n), (), i in best_effort)
        for i, (t, n) in enumerate(zip(dues, outputs, strict=True))
    ]


def judged(core: Any, load: list[Job], least: float) -> Replay:
    return replay(core, load, SERIAL, judge=Prospect(load, SERIAL, least))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(
    gaps=st.lists(st.floats(0.0, 4.0), min_size=1, max_size=12),
    outputs=st.lists(st.integers(1, 6), min_size=12, max_size=12),
    least=st.sampled_from([0.3, 0.5, 0.9, 1.0]),
    best_effort=st.sets(st.integers(1, 11)),
)
def test_only_what_has_failed_is_cut_short(
    fake_core: Any, gaps: list[float], outputs: list[int], least: float, best_effort: set[int]
) -> None:
    dues = [sum(gaps[: i + 1]) for i in range(len(gaps))]
    load = jobs(dues, outputs[: len(gaps)], best_effort)
    whole, found = replay(fake_core(1.0, 0.5), load, SERIAL), judged(fake_core(1.0, 0.5), load, least)
    share = attainment(whole, SERIAL)
    if found.reachable is None:
        assert found.served == whole.served
        assert share >= least
    else:
        assert share <= found.reachable == attainment(found, SERIAL) < least
        assert all(s.reason in (FinishReason.LENGTH, FinishReason.CANCELLED) for s in found.served)


def test_who_waits_too_long_for_a_first_token_has_missed(fake_core: Any) -> None:
    """The first one holds the server for 51 s; the second is late at 2.1 s, the third at 3.2 s."""
    found = judged(core := fake_core(1.0, 0.5), jobs([0.0, 0.1, 1.2, 1.7, 60.0], [101, 1, 1, 1, 1]), 0.7)
    assert found.reachable == 0.6 and core.idle
    assert core.now() - found.started < 5.0
    assert [s.reason for s in found.served] == [FinishReason.CANCELLED] * 5


def test_of_several_seeds_each_may_fail_as_far_as_the_others_can_make_good() -> None:
    assert hopeless_below(0.9, 1) == 0.9 and hopeless_below(0.9, 2) == 0.8 and hopeless_below(0.5, 4) == 0.0
