from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smpart.bench.metrics import attainment, backlog_grows, itl_ms, met, percentiles, summarise, tpot_ms, ttft_ms
from smpart.bench.replay import Job, Replay, Served, replay
from smpart.engine.log import RunLog
from smpart.engine.request import FinishReason
from smpart.runtime.sampling import SamplingParams
from smpart.scheduler.slo import SLO

KEYS = """requests finished refused ttft_ms tpot_ms itl_ms goodput_rps slo_attainment throughput_tok_s bubble resizes
decision_us"""


def served(due: float, *times: float, reason: FinishReason = FinishReason.LENGTH, index: int = 0) -> Served:
    return Served(index, due, 10, max(1, len(times)), times, (1,) * len(times), reason)


def result(*requests: Served, seconds: float = 10.0) -> Replay:
    return Replay(requests, RunLog(), 0.0, seconds)


def test_latencies_by_hand() -> None:
    one = served(1.0, 1.5, 1.6, 2.0)
    assert ttft_ms(one) == pytest.approx(500)
    assert tpot_ms(one) == pytest.approx(250)  # (2.0 - 1.5) / 2
    assert itl_ms(one) == pytest.approx([100, 400])
    assert ttft_ms(served(1.0)) is None and tpot_ms(served(1.0, 2.0)) is None and itl_ms(served(1.0, 2.0)) == []


@pytest.mark.parametrize(
    ("slo", "good"),
    [
        (SLO(501, 251, 401), True),
        (SLO(499, 251, 401), False),
        (SLO(501, 249, 401), False),
        (SLO(501, 251, 399), False),
        (SLO(501, 251), True),  # gaps of 400 ms under the default of twice the TPOT
    ],
)
def test_every_objective_counts(slo: SLO, good: bool) -> None:
    assert met(served(1.0, 1.5, 1.6, 2.0), slo) is good


def test_a_single_token_has_no_pace_and_a_failed_request_missed() -> None:
    slo = SLO(1000, 1)
    assert met(served(0.0, 0.9), slo)
    for reason in (FinishReason.REFUSED, FinishReason.ERROR, FinishReason.CANCELLED):
        assert not met(served(0.0, 0.1, reason=reason), slo)


def test_goodput_is_shared_out_over_the_devices_used() -> None:
    summary = summarise(result(served(0.0, 0.5), served(1.0, 1.5)), SLO(1000, 100), gpus=2)
    assert (summary["gpus"], summary["goodput_rps"], summary["goodput_per_gpu_rps"]) == (2, 0.2, 0.1)


def test_goodput_attainment_and_throughput_by_hand() -> None:
    slo = SLO(1000, 100)
    run = result(
        served(0.0, 0.5, 0.55, 0.6),
        served(0.0, 2.0, 2.05),  # too late
        served(1.0, reason=FinishReason.REFUSED),
        served(5.0, 5.1),
    )
    summary: Any = summarise(run, slo)
    assert summary["goodput_rps"] == pytest.approx(2 / 10)
    assert summary["slo_attainment"] == attainment(run, slo) == 0.5
    assert summary["throughput_tok_s"] == pytest.approx(6 / 10)
    assert (summary["requests"], summary["finished"], summary["refused"]) == (4, 3, 1)
    assert summary["ttft_ms"]["p50"] == pytest.approx(500)
    assert summary["itl_ms"]["max"] == pytest.approx(50)


def test_the_record_has_the_keys_of_the_contract_and_is_json_even_when_nothing_ran() -> None:
    summary = summarise(result(served(0.0, reason=FinishReason.ERROR), seconds=0.0), SLO())
    assert set(KEYS.split()) <= set(summary)
    assert json.loads(json.dumps(summary, allow_nan=False))["ttft_ms"] == {"p50": None, "p95": None, "p99": None}


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=40))
def test_percentiles_are_ordered_and_within(values: list[float]) -> None:
    found = percentiles(values, 50, 95, 99)
    numbers = [v for v in found.values() if v is not None]
    assert len(numbers) == 3 and numbers == sorted(numbers)
    assert min(values) - 1e-5 <= numbers[0] and numbers[-1] <= max(values) + 1e-5


@pytest.mark.parametrize(("gap", "grows"), [(1.5, False), (0.9, True)])
def test_the_queue_grows_exactly_when_arrivals_outrun_the_server(fake_core: Any, gap: float, grows: bool) -> None:
    """One second a request: arrivals every 1.5 s are kept up with, every 0.9 s they are not."""
    jobs = [Job(i * gap, range(5), SamplingParams(max_tokens=1), ()) for i in range(60)]
    assert backlog_grows(replay(fake_core(1.0, 0.1), jobs, SLO())) is grows


def test_who_was_promised_nothing_is_not_judged() -> None:
    slo = SLO(1000, 100)
    late = replace(served(0.0, 5.0, 9.0), best_effort=True)
    run = result(served(0.0, 0.5, 0.55), late, served(1.0, 3.0))
    summary: Any = summarise(run, slo)
    assert summary["slo_attainment"] == attainment(run, slo) == 0.5
    assert summary["ttft_ms"]["p50"] == pytest.approx(1250) and summary["itl_ms"]["max"] == pytest.approx(50)
    assert summary["throughput_tok_s"] == pytest.approx(5 / 10)
    assert summary["goodput_rps"] == pytest.approx(1 / 3.0), "until the last of the others ended"
    assert summary["best_effort"]["requests"] == summary["best_effort"]["finished"] == 1
    assert summary["best_effort"]["throughput_tok_s"] == pytest.approx(2 / 10)
    assert summarise(result(served(0.0, 0.5)), slo)["best_effort"] is None


def test_a_queue_of_best_effort_requests_is_no_backlog() -> None:
    crowd = [served(0.1 * i, 50.0 + i) for i in range(40)]
    assert backlog_grows(result(*crowd))
    assert not backlog_grows(result(*(replace(each, best_effort=True) for each in crowd), served(0.0, 0.1)))
