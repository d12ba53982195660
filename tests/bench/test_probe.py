from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smpart.bench.budget import choose
from smpart.bench.load import Arrival, Load
from smpart.bench.probe import Speed, even_split
from smpart.partition import Split

SPEED = Speed(prefill_tok_s=240, step_s=0.1, row_s=0.02, lanes="static:1/1")


def test_little_by_hand() -> None:
    """20 tokens/s at 0.1 + 0.02 b seconds a step: a batch of b gives b / step tokens/s, so b = 10/3."""
    batch = SPEED.batch_at(20.0)
    assert batch == pytest.approx(10 / 3) and batch / SPEED.step(batch) == pytest.approx(20.0)
    assert SPEED.batch_at(50.0) == float("inf")


def test_objectives_by_hand() -> None:
    load = Load("x", tuple(Arrival(float(i), 480, 10) for i in range(11)))
    assert SPEED.mean_batch(load) == pytest.approx(10 * 0.1 / (1 - 10 * 0.02))
    slo = SPEED.slo_for(load, batch=4)
    assert (slo.ttft_ms, slo.tpot_ms) == (pytest.approx(4000), pytest.approx(360))


def test_all_at_once_has_the_batch_of_all() -> None:
    assert SPEED.mean_batch(Load("x", tuple(Arrival(0.0, 10, 10) for _ in range(7)))) == 7


def test_rate_uses_the_share_of_the_busier_lane() -> None:
    assert SPEED.rate_for([240], [1], load=0.5) == pytest.approx(0.5)  # prefill-bound: 0.5 prompts of 240 tokens
    decode = 32 / SPEED.step(32) / 100
    assert SPEED.rate_for([1], [100], load=0.5) == pytest.approx(0.5 * decode)


def test_chunk_budget_fits_the_objective_or_keeps_up() -> None:
    asked = []

    def hybrid(tokens: int) -> float:
        asked.append(tokens)
        return 0.18 + tokens / 360

    assert choose(hybrid, 0.54, prompt_tok_s=10) == 128  # 0.18 + 128 / 360 = 0.536 s
    assert asked == [32, 64, 128, 256], "what cannot fit any more is not measured"
    assert choose(hybrid, 0.54, prompt_tok_s=250) == 512  # 512 / (0.18 + 1.42) = 320 tok/s
    assert choose(hybrid, 0.001, prompt_tok_s=1) == 32
    assert choose(hybrid, 0.001, prompt_tok_s=1e9) == 512  # 320 tok/s of the 349 that 2048 takes in


@given(st.integers(1, 200), st.integers(1, 200))
def test_even_split_is_the_most_even_there_is(left: int, right: int) -> None:
    splits = (Split(0, left + right), Split(left, right), Split(left + right, 0))
    assert even_split(splits) == f"static:{left}/{right}"
    assert even_split((splits[0], splits[2])) == "mixed"


def test_even_is_by_units() -> None:
    assert even_split(tuple(Split(p, 132 - p) for p in (0, 8, 64, 72, 132))) == "static:64/68"
