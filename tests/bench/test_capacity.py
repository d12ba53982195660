from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smpart.bench.capacity import Care, Trial, search

CLOSE = Care(stride=1.2, least=1.0)


@given(st.floats(0.01, 1000), st.floats(0.01, 1000))
def test_finds_the_rate_at_which_attainment_breaks(true: float, guess: float) -> None:
    found = search(lambda rate: Trial(rate, 1.0 if rate <= true else 0.5, False), guess, most=40)
    assert found.rate <= true <= found.rate * 1.05 * 1.0001


def test_a_growing_queue_does_not_count() -> None:
    found = search(lambda rate: Trial(rate, 1.0, grows=rate > 3.0), 1.0)
    assert 3.0 / 1.05 <= found.rate <= 3.0


def test_nothing_holds() -> None:
    found = search(lambda rate: Trial(rate, 0.0, False), 1.0, most=5)
    assert found.rate == 0.0 and [t.rate for t in found.trials] == [1.0, 0.5, 0.25, 0.125, 0.0625]


def test_the_target_is_the_one_asked_for() -> None:
    found = search(lambda rate: Trial(rate, 1.0 - rate / 100, False), 1.0, target=0.99)
    assert found.rate == pytest.approx(1.0, rel=0.06)


@pytest.mark.parametrize("truth", [1.0, 1.3, 5.0])
def test_a_rate_between_the_least_and_the_first_that_fails_is_found(truth: float) -> None:
    found = search(lambda rate: Trial(rate, 1.0 if rate <= truth else 0.0, False), 10.0, CLOSE)
    assert truth / 1.06 <= found.rate <= truth
    nothing = search(lambda rate: Trial(rate, 0.0, False), 10.0, CLOSE)
    assert nothing.rate == 0.0 and min(trial.rate for trial in nothing.trials) == 1.0


def test_a_search_that_met_no_rate_that_fails_says_so() -> None:
    everything = search(lambda rate: Trial(rate, 1.0, False), 1e-4)
    assert everything.open and everything.rate == max(trial.rate for trial in everything.trials)
    assert not search(lambda rate: Trial(rate, 1.0 if rate < 3 else 0.0, False), 1.0).open
    assert not search(lambda rate: Trial(rate, 0.0, False), 1.0).open
