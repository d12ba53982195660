"""Finding the best of several, what a load asks for, objectives out of reach, and runs on several processes."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smpart.bench.advise.contenders import Contenders
from smpart.bench.advise.facts import Facts
from smpart.bench.advise.fleet import fleet
from smpart.bench.advise.knockout import knockout
from smpart.bench.advise.question import Question
from smpart.bench.advise.rates import Rates, Search
from smpart.bench.advise.reach import out_of_reach
from smpart.bench.bench import Chosen, Options, Task
from smpart.bench.capacity import Care, Trial, search
from smpart.bench.crew import Recipe
from smpart.bench.load import Arrival, Load, Prefix
from smpart.bench.source import TraceOptions
from smpart.bench.typical import Typical, fresh_tokens
from smpart.errors import SmpartError, UsageError
from smpart.kvcache import KVConfig
from smpart.partition import Shape
from smpart.partition.gpus import GPUS
from smpart.scheduler.slo import SLO


@given(st.lists(st.floats(0.05, 500.0), min_size=1, max_size=8), st.floats(0.1, 100.0))
def test_the_winner_holds_nearly_as_much_as_the_best(capacities: list[float], guess: float) -> None:
    true = {f"p{i}": capacity for i, capacity in enumerate(capacities)}

    def attempt(names: Sequence[str], rate: float) -> dict[str, Trial]:
        return {name: Trial(rate, min(1.0, 0.9 * true[name] / rate), False) for name in names}

    won = knockout(list(true), attempt, guess, target=0.9, most=40)
    assert true[won.name] >= max(capacities) / 1.1
    assert won.rate <= true[won.name]


def test_those_who_fail_are_not_tried_again() -> None:
    true, asked = {"a": 1.0, "b": 9.0}, list[tuple[str, float]]()

    def attempt(names: Sequence[str], rate: float) -> dict[str, Trial]:
        asked.extend((name, rate) for name in names)
        return {name: Trial(rate, float(true[name] >= rate), False) for name in names}

    assert knockout(["a", "b"], attempt, 4.0, target=0.9).name == "b"
    assert asked == [("a", 4.0), ("b", 4.0)]


def test_a_good_guess_takes_few_trials() -> None:
    found = search(lambda rate: Trial(rate, float(rate <= 10.0), False), 9.5, Care(0.03, 1.25))
    assert found.rate == pytest.approx(10.0, rel=0.03) and len(found.trials) <= 6


def test_rates_that_do_not_matter_are_not_tried() -> None:
    found = search(lambda rate: Trial(rate, 0.0, False), 1.0, Care(stride=1.25, least=0.2))
    assert found.rate == 0.0 and min(trial.rate for trial in found.trials) >= 0.2


def test_what_others_began_with_is_not_new() -> None:
    def arrival(tokens: int, *ids: int) -> Arrival:
        return Arrival(0.0, tokens, 10, Prefix(ids, Fraction(512)))

    arrivals = [arrival(1024, 1, 2), arrival(1100, 1, 2, 3), arrival(600, 1, 9), arrival(512, 1), Arrival(0.0, 70, 1)]
    assert fresh_tokens(arrivals) == [1024, 76, 88, 1, 70]
    typical = Typical.of(Load("", tuple(arrivals)))
    assert typical.head == Shape.prefill([(typical.fresh, typical.prompt - typical.fresh)])
    assert typical.step(3) == Shape.decode(3, 3 * typical.context)


def cost(shape: Shape, units: int, neighbour: Shape, others: int) -> float:
    """A millisecond a prompt token, ten a step."""
    return 1e-3 * shape.prefill_tokens + 1e-2 * bool(shape.decode_batch)


@pytest.mark.parametrize(
    ("slo", "words"),
    [
        (SLO(500, 20), None),
        (SLO(500, 9), "tpot is 9 ms"),
        (SLO(500, 20, 5), "itl is 5 ms"),
        (SLO(199, 20), "20% of the prompts take longer"),
        (SLO(1, 20), "100% of the prompts"),
    ],
)
def test_objectives_out_of_reach(slo: SLO, words: str | None) -> None:
    load = Load("", tuple(Arrival(float(i), 200 if i % 5 == 0 else 100, 8) for i in range(10)))
    reason = out_of_reach(load, Typical.of(load), slo, 0.1, cost, 132)
    assert reason is None if words is None else reason is not None and words in reason


def test_tables_are_as_long_as_the_load_can_need() -> None:
    typical = Typical(prompt=90, fresh=90, answer=32, context=100)
    assert typical.rate(cost, 132) == pytest.approx(10.0)  # 90 ms of prefill, 32 steps of 10 ms shared by 32
    assert typical.most(cost, 132, 0.05) == 32  # 10 a second, each for 32 steps of 50 ms, twice over


def test_contenders_exist_on_the_device() -> None:
    splits = GPUS["a100"].splits()
    quick = Contenders.of(splits, (), lambda tokens: tokens <= 600, quick=True)
    assert quick.budgets == ("chunked:256", "chunked:512", "chunked:1024") and quick.table is None
    whole = Contenders.of(splits, (), lambda tokens: False, quick=False)
    assert whole.budgets == ("chunked:32", "chunked:64", "chunked:128") and len(whole.fixed) == 7
    assert {policy.partition(":")[2] for policy in (*quick.fixed, *whole.fixed)} <= {str(split) for split in splits}


def ask(gpu: str = "h100", trace: str = "synth:chat", limit: int | None = None, quick: bool = False) -> Question:
    return Question.ask("llama-3.1-8b", gpu, trace, SLO(200, 50), limit=limit, seed=3, jobs=1, quick=quick)


def test_a_question_fills_in_what_was_not_asked() -> None:
    assert ask().contentions == (1.0, 1.1, 1.2, 1.3) and ask().seeds == (3, 4)
    assert ask(quick=True).contentions == (1.0, 1.3) and ask(quick=True).seeds == (3,)
    assert ask(gpu="h100-roofline").contentions == (1.0,)
    assert ask().shortened(2).source.limit == 1000
    assert ask(limit=20, quick=True).shortened(1).source.limit == 20
    assert [ask(quick=True).shortened(batch).source.limit for batch in (1, 15, 99)] == [60, 300, 500]
    assert ask().worst == 1.3 and list(ask().others()) == [1.2, 1.1, 1.0]
    assert [ask(gpu="h100x2").backend(c) for c in (1.0, 1.3)] == ["sim:h100x2", "sim:h100x2~1.3"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"gpu": "abacus"}, "sim:h100"),
        ({"gpu": "h100~1.2"}, "contention is swept"),
        ({"trace": "nowhere.csv"}, "no such file"),
        ({"limit": 9}, "too few"),
        ({"limit": 0}, "--limit 0"),
    ],
)
def test_questions_that_cannot_be_asked(arguments: dict[str, object], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        ask(**arguments)  # type: ignore[arg-type]


POLICIES = ("chunked:512", "static:96/36")


def recipe(count: int = 12) -> Recipe:
    slo = SLO(500, 50)
    options = Options(POLICIES, TraceOptions("synth:code", count), slo, (1.0,), jobs=1)
    chosen = Chosen((1.0,), count, slo, {policy: policy for policy in POLICIES})
    return Recipe("llama-3.1-8b", "sim:h100-roofline", "bfloat16", KVConfig(), "none", options, chosen)


def test_a_rate_is_run_once_and_facts_agree_with_the_record() -> None:
    with fleet([recipe()], 1) as crews:
        rates = Rates(crews["sim:h100-roofline"], 0.9)
        first = rates.attempt(POLICIES, 4.0, 0)
        assert rates.attempt(POLICIES[:1], 4.0, 0) == {POLICIES[0]: first[POLICIES[0]]} and rates.runs == 2
        (capacity,) = rates.capacities([Search(POLICIES[0], 0, 4.0)])
        assert capacity > 0.0
        run = rates.run(POLICIES[0], 4.0, 0)
    facts = Facts.of(run)
    assert facts.met == run.record["slo_attainment"] == first[POLICIES[0]].attainment
    assert facts.policy == "chunked:512" and facts.rate == pytest.approx(4.0, rel=1e-3)
    assert facts.hybrid_ms is not None and facts.plain_ms is not None and facts.hybrid_ms > facts.plain_ms
    assert 0.0 < facts.hybrid_share < 1.0 and 0.0 < facts.batch < 12.0


@pytest.mark.slow
def test_processes_find_what_one_process_finds() -> None:
    task = Task(POLICIES[0], 4.0, 0)
    with fleet([recipe()], 1) as alone, fleet([recipe()], 2) as apart:
        (mine,), (theirs,) = (list(crews["sim:h100-roofline"].runs([task])) for crews in (alone, apart))
    assert [s.times_s for s in mine.replay.served] == [pytest.approx(s.times_s) for s in theirs.replay.served]


@pytest.mark.slow
def test_a_process_that_dies_ends_it_in_one_line() -> None:
    with fleet([recipe()], 2) as crews:
        crew = crews["sim:h100-roofline"]
        crew._pool.submit(_die)  # type: ignore[attr-defined]
        with pytest.raises(SmpartError, match="a process of advise died"):
            list(crew.runs([Task(POLICIES[0], 4.0, seed) for seed in range(4)]))


def _die() -> None:
    import os

    os._exit(1)
