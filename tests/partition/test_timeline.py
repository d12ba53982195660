"""When a lane's works ran, reckoned from the device's distances and from the moments at which their ends were seen."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smpart.partition.cuda.timeline import Timeline

MILLISECONDS = st.floats(0, 0.1)


@given(st.lists(st.tuples(MILLISECONDS, MILLISECONDS, MILLISECONDS), min_size=1, max_size=150))
def test_an_end_lies_between_the_devices_and_the_moment_it_was_seen(works: list[tuple[float, float, float]]) -> None:
    line, clock, before = Timeline(), 5.0, None
    for gap, took, late in works:
        clock += gap + took
        start, end = line.place(clock + late, took, None if before is None else gap + took)
        assert clock - 1e-9 <= end <= clock + late + 1e-9
        assert before is None or before - 1e-9 <= start  # a lane's works do not overlap
        assert end - start <= took + 1e-9
        before = end


def test_a_late_notice_moves_nothing() -> None:
    line = Timeline()
    assert line.place(10.0, 1.0, None) == (9.0, 10.0)
    assert line.place(12.5, 1.5, 2.0) == (10.5, 12.0)  # half a second late
    assert line.place(12.75, 0.5, 1.0) == (12.25, 12.75)  # in time: the line had been late before
    assert line.place(13.5, 1.0, 0.5) == (12.75, 13.25)  # it did not begin before the one before had ended
    assert line.place(20.0, 2.0, None) == (18.0, 20.0)  # on another stream
    assert line.place(20.5, 2.0, None) == (20.0, 20.5)


@pytest.mark.parametrize("interrupted", [False, True])
def test_of_sixty_four_works_the_quickest_notice_says_how_far_the_clocks_have_drifted(interrupted: bool) -> None:
    line = Timeline()
    seen = 100.0
    line.place(seen, 0.5, None)
    if interrupted:  # what was learnt before a switch of streams is of no use after it
        for _ in range(40):
            seen += 1.0
            line.place(seen + 0.125, 0.5, 1.0)
        seen += 1.0
        line.place(seen, 0.5, None)
    for nth in range(1, 64):
        late = 0.25 if nth == 20 else 0.5
        assert line.place(seen + nth + late, 0.5, 1.0)[1] == seen + nth
    assert line.place(seen + 64.5, 0.5, 1.0)[1] == seen + 64.25
    for nth in range(65, 128):
        assert line.place(seen + nth + 0.5, 0.5, 1.0)[1] == seen + nth + 0.25
    assert line.place(seen + 128.5, 0.5, 1.0)[1] == seen + 128.5


def test_a_device_with_a_slow_clock_does_not_fall_behind_for_good() -> None:
    line = Timeline()
    line.place(0.0, 0.5, None)
    lags = [nth - line.place(float(nth), 0.5, 1 - 1e-6)[1] for nth in range(1, 2000)]
    assert max(lags) < 130e-6
    assert all(lag >= 0 for lag in lags) and not any(one == other for one, other in itertools.pairwise(lags[:60]))
