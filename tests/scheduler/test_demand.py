"""What first tokens are worth at some pace of prefill, by two ways of counting."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smpart.scheduler.demand import EARLY, LATE, Demand, Firsts


def demand(jobs: list[tuple[float, float, int]]) -> Demand:
    work, first, weight = (list(column) for column in zip(*jobs, strict=True))
    return Demand([1.0], [], 0.0, 0.1, 0.2, 0.0, work, first, weight, 1e-3, 1e-3, False, False)


jobs = st.lists(st.tuples(st.floats(1e-3, 5.0), st.floats(-1.0, 10.0), st.integers(1, 4)), min_size=1, max_size=12)


@given(jobs, st.floats(-0.5, 0.5), st.floats(0.01, 1.0))
def test_sums_known_in_advance_agree_with_counting_one_by_one(
    asked: list[tuple[float, float, int]], start: float, pace: float
) -> None:
    firsts = Firsts(demand(asked), start)
    worth, kept = firsts.at(pace)
    slowly, counted = firsts.after(firsts.ends(0.0, pace))
    assert worth == pytest.approx(slowly, abs=1e-6)
    assert abs(kept - counted) <= sum(w for _, _, w in asked if kept != counted)
    assert kept <= firsts.total == sum(weight for _, _, weight in asked)


@given(jobs, st.floats(0.0, 2.0), st.floats(0.01, 0.9))
def test_more_pace_and_a_head_start_are_never_worth_less(
    asked: list[tuple[float, float, int]], head: float, pace: float
) -> None:
    firsts = Firsts(demand(asked), 0.0)
    assert firsts.at(pace * 1.1)[0] >= firsts.at(pace)[0] - 1e-9
    assert firsts.after(firsts.ends(head, pace))[0] >= firsts.after(firsts.ends(0.0, pace))[0] - 1e-9
    assert 0.0 <= firsts.needed(firsts.ends(head, pace)) <= 1.0


def test_worth_by_hand() -> None:
    firsts = Firsts(demand([(1.0, 2.0, 1)]), 0.0)
    assert firsts.at(1.0) == (1.0, 1), "half of its time early"
    assert firsts.at(0.5) == (pytest.approx(LATE / (EARLY + LATE)), 1), "just in time"
    assert firsts.at(0.4)[0] < 0.0 and firsts.at(0.4)[1] == 0, "a quarter late"
    assert firsts.needed(firsts.ends(0.0, 1.0)) == pytest.approx(1.0 / (2.0 * (1.0 - EARLY)))
