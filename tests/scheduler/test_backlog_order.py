"""Who is served first, against brute force."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smpart.scheduler.backlog import Turns, _fewest_late, backlog
from smpart.scheduler.costs import Costs
from smpart.scheduler.pace import Readers
from tests.scheduler.double import Oracle, gpu_cost
from tests.scheduler.still import decoding, still, waiting

jobs = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 30)), min_size=1, max_size=7)


def on_time(order, jobs) -> int:
    end, count = 0, 0
    for job in order:
        end += jobs[job][0]
        count += end <= jobs[job][1]
    return count


@settings(max_examples=60, deadline=None)
@given(jobs)
def test_the_fewest_are_late(jobs) -> None:
    jobs = sorted(jobs, key=lambda job: job[1])
    kept, lost = _fewest_late([float(j[0]) for j in jobs], [float(j[1]) for j in jobs], 0.0)
    assert sorted(kept + lost) == list(range(len(jobs)))
    assert on_time(kept, jobs) == len(kept)
    assert len(kept) == max(on_time(order, jobs) for order in itertools.permutations(range(len(jobs))))


def order_of(snapshot, ahead: float = 0.0):
    costs = Costs()
    costs.tick(snapshot.predictor, snapshot.units)
    return backlog(snapshot, costs, Turns(), ahead, 1.0, 0.1)


def test_lost_rows_go_behind_and_best_effort_last() -> None:
    rows = [
        waiting(500, ttft_deadline=0.9, arrival=0.8), waiting(500, best_effort=True, ttft_deadline=9.0),
        waiting(500, ttft_deadline=1.5, arrival=1.0), waiting(500, outputs=3, ttft_deadline=0.2),
    ]  # fmt: skip
    assert order_of(still(rows)).rows.tolist() == [3, 2, 0, 1]


def test_a_short_prompt_passes_a_long_one_only_if_that_costs_it_nothing() -> None:
    rows = [waiting(9000, ttft_deadline=1.9, arrival=0.9), waiting(200, ttft_deadline=1.95, arrival=0.95)]
    assert order_of(still(rows)).rows.tolist() == [1, 0]
    costs = Costs()
    costs.tick(Oracle(gpu_cost), 132)
    tight = [
        waiting(9000, ttft_deadline=1.001 + costs.work_of(9000), arrival=0.9),
        waiting(200, ttft_deadline=1.95, arrival=0.95),
    ]
    assert order_of(still(tight)).rows.tolist() == [0, 1]


def test_one_start_in_four_is_for_the_longest_waiting() -> None:
    rows = [waiting(900, ttft_deadline=-3.0, arrival=-3.5)] + [waiting(500, ttft_deadline=1.5, arrival=1.0)] * 3
    costs, turns = Costs(), Turns()
    first = still(rows)
    costs.tick(first.predictor, first.units)
    assert backlog(first, costs, turns, 0.0, 1.0, 0.1).rows[0] == 0
    assert backlog(first, costs, turns, 0.0, 1.0, 0.1).rows[0] == 0
    first.table.cached[0] = 400
    assert backlog(first, costs, turns, 0.0, 1.0, 0.1).rows[0] != 0
    assert backlog(still(rows, now=1.0 + 3.5 * 0.1), costs, turns, 0.0, 1.0, 0.1).rows[0] == 0


def test_best_effort_work_does_not_age_past_interactive_work() -> None:
    patient = waiting(900, ttft_deadline=-3.0, arrival=-3.5, best_effort=True)
    assert order_of(still([patient] + [waiting(500, ttft_deadline=1.5, arrival=1.0)] * 3)).rows[-1] == 0


def test_nobody_ages_past_a_reader_who_lost_the_blocks() -> None:
    reader = waiting(600, outputs=40, first_token=0.5, last_token=0.9, ttft_deadline=0.6)
    aged = [waiting(400, ttft_deadline=-3.0, arrival=-3.5)] * 3
    assert order_of(still([*aged, reader])).rows[0] == 3


def test_slack_is_lent_but_no_gap_exceeds_the_longest_allowed() -> None:
    table = still([
        decoding(100, outputs=1, first_token=1.0, last_token=1.0),  # on pace
        decoding(100, outputs=40, first_token=0.0, last_token=1.0),  # a second ahead
        decoding(100, outputs=10, first_token=0.0, last_token=1.0),  # behind
        decoding(100, outputs=10, first_token=0.0, last_token=0.2),  # stalled for long
    ]).table  # fmt: skip
    readers = Readers(table, np.arange(4))
    due = readers.latest(table, 1.0, 0.010)
    assert due[:3] == pytest.approx(1.1), "the ITL objective after the last token"
    assert due[3] == pytest.approx(1.0115), "no earlier than the device can do it"
    pace, ends = readers.pace(table)
    assert pace[0] == pytest.approx(1.05, abs=2e-3) and pace[1] == pytest.approx(2.0, abs=0.07)
    assert pace[2] < 1.0 and pace[3] == pace[2]
    assert ends == pytest.approx(5 / (61 + 128)), "how long answers are comes from how long these have gone on"


def test_readers_who_cannot_be_served_in_time_are_owed_twice_what_can_be_done() -> None:
    table = still([decoding(100, first_token=1.0, last_token=1.0)]).table
    due = Readers(table, np.arange(1)).latest(table, 1.0, 0.2)
    assert abs(due[0] - 1.4) < 1e-9
