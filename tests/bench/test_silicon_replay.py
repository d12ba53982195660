"""Replays of what others measured: the rules that make them comparable, the constants, and how far off they are."""

from dataclasses import replace

import numpy as np
import pytest

from smpart.bench.replay import Job, replay
from smpart.bench.silicon import (
    AT_ODDS,
    FITTED_ON,
    WARM_UP_S,
    busy,
    closed_loop,
    end_to_end,
    estimate,
    fit_hosts,
    fit_run,
    predict,
    real_run,
    replay_real_run,
    summary,
)
from smpart.bench.silicon.admission import Reserving
from smpart.bench.silicon.core import PATIENT, virtual_core
from smpart.bench.silicon.engines import SYNCHRONOUS, engine_of
from smpart.bench.silicon.hosts import Gap, chosen, nearest
from smpart.runtime.sampling import SamplingParams
from smpart.scheduler.registry import Setup, make_policy
from smpart.sim import DIMENSIONS
from smpart.sim.host import HOSTS

MODEL = DIMENSIONS["llama-3.1-8b"].shape


def at_rate(shape, units, neighbour, neighbour_units):
    """A step takes 10 ms and a prompt token 10 us."""
    return 0.01 * (shape.decode_batch > 0) + 1e-5 * shape.prefill_tokens


def loop(clients, prompt, output, *, together, policy="chunked:8192"):
    core = virtual_core(MODEL, "h100", at_rate, make_policy(policy), blocks=10_000, sequences=64)
    return closed_loop(core, clients, prompt, output, together=together)


def point(**wanted):
    return next(p for p in end_to_end() if all(getattr(p, name) == value for name, value in wanted.items()))


def test_one_client_waits_for_its_prompt_and_then_for_each_step():
    ours = loop(1, 1000, 50, together=True)
    assert ours.ttft.tolist() == pytest.approx([0.01])
    assert ours.tpot.tolist() == pytest.approx([0.01])


def test_clients_that_begin_together_stay_together_where_prompts_go_first():
    """Eight prompts of 10 ms each run before anybody decodes; so no token waits for a prompt, and all prompts wait."""
    ours = loop(8, 1000, 50, together=True, policy="mixed:8192")
    assert ours.ttft == pytest.approx(np.full(8, 0.08))
    assert ours.tpot == pytest.approx(np.full(8, 0.01))


def test_clients_out_of_step_wait_for_each_other_s_prompts():
    """Between two requests of a client each of seven others has one of 10 ms, in 50 steps; its own shares its step."""
    ours = loop(8, 1000, 50, together=False)
    assert ours.tpot.mean() == pytest.approx(0.01 + 7 * 0.01 / 50, rel=0.05)
    assert 0.02 <= ours.ttft.mean() <= 0.04


@pytest.mark.parametrize(("rule", "first"), [("chunked", 0.03), ("reserving", 0.5)])
def test_a_prompt_that_does_not_fit_as_a_whole_waits(rule, first):
    """Of 64 blocks, 1024 tokens, a request of 500 + 50 leaves too few for one of 700: it waits until that has ended."""
    policy = Reserving(Setup("256")) if rule == "reserving" else make_policy("chunked:256")
    core = virtual_core(MODEL, "h100", at_rate, policy, blocks=64, sequences=8)
    params = SamplingParams(max_tokens=50, ignore_eos=True)
    jobs = [Job(0.0, range(500), params), Job(0.001, range(1000, 1700), params)]
    later = replay(core, jobs, PATIENT).served[1]
    assert later.times_s[0] >= first
    assert (later.preemptions == 0) == (rule == "reserving")


def test_nearest_overheads_are_those_that_were_added():
    gaps = [Gap(n, 5e-3 + 1e-4 * n + 1.2e-3 + 20e-6 * n, 5e-3 + 1e-4 * n) for n in (1, 8, 32, 128)]
    host = nearest(gaps)
    assert (host.step, host.sequence) == pytest.approx((1.2e-3, 20e-6))


@pytest.mark.slow
def test_nothing_is_fitted_on_points_that_are_predicted():
    groups = chosen(end_to_end())
    assert set(groups) == {"vllm 0.12", "sglang", "trtllm"}
    for family, points in groups.items():
        assert all(p.fitted_on and busy(p) < AT_ODDS and engine_of(p).family == family for p in points)


def test_points_at_odds_with_the_op_tables_are_found():
    """64 clients of 2,000 tokens each every 1.1 s: 1.7 times what an H200 takes in, by the op tables, if it does
    nothing else."""
    odd = point(gpu="h200", engine="vllm", version="0.12.0", concurrency=64, prompt=2000)
    assert busy(odd) > 1.6
    assert busy(replace(odd, ttft=2 * odd.ttft, tpot=2 * odd.tpot)) == pytest.approx(busy(odd) / 2, rel=0.02)
    assert busy(point(gpu="h100", engine="vllm", name="llama-3.1-70b fp8 tp2", concurrency=16, prompt=1024)) < 1.0


@pytest.mark.parametrize(
    "wanted",
    [
        {"engine": "sglang", "concurrency": 16, "prompt": 1024, "output": 128},
        {"engine": "vllm", "version": "0.12.0", "concurrency": 8, "prompt": 1024, "output": 128},
        {"engine": "trtllm", "concurrency": 16, "prompt": 4096, "output": 256},
    ],
)
def test_short_closed_loops_take_about_the_time_a_token_that_was_measured(wanted):
    measured = point(gpu="h100", **wanted)
    assert predict(measured).tpot.mean() == pytest.approx(measured.tpot, rel=0.15)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_the_rival_can_be_asked():
    measured = point(gpu="h200", engine="vllm", name="llama-3.1-70b fp8 tp2", concurrency=16, prompt=1024)
    assert estimate(measured).tpot == pytest.approx(measured.tpot, rel=0.2)


def test_the_first_answers_of_the_real_run_come_when_they_came(data):
    """Which requests were scheduled together, and how long the first launch took, to a few milliseconds in a second."""
    run = real_run()
    ours = replay_real_run(run.first(41))
    assert ours.ttft[:38] == pytest.approx(run.measured.ttft[:38], abs=0.02)


@pytest.mark.slow
def test_constants_are_those_that_the_first_requests_give(data):
    fitted = fit_run(real_run())
    assert fitted.warm_up == pytest.approx(WARM_UP_S, abs=2e-3)
    assert fitted.step == pytest.approx(HOSTS["vllm"].step, abs=0.02e-3)


@pytest.mark.slow
def test_overheads_are_those_that_the_fitted_half_of_the_points_gives():
    """To a cell of the grid that they are searched on."""
    families = {"vllm 0.12": SYNCHRONOUS, "sglang": HOSTS["sglang"], "trtllm": HOSTS["trtllm"]}
    for family, found in fit_hosts(end_to_end(), lambda line: None).items():
        assert found.step == pytest.approx(families[family].step, abs=0.11e-3)
        assert found.sequence == pytest.approx(families[family].sequence, abs=4.1e-6)


@pytest.mark.slow
def test_the_other_requests_of_the_real_run_are_predicted(data):
    run = real_run()
    held = slice(FITTED_ON, None)
    ours, measured = summary(replay_real_run(run), held), summary(run.measured, held)
    errors = {name: abs(ours[name] / measured[name] - 1) for name in measured}
    tail = errors.pop("TPOT p95")  # docs/simulator.md says why
    assert max(errors.values()) <= 0.03
    assert tail <= 0.06
