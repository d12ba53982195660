from __future__ import annotations

from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smpart.bench.load import Arrival, Load, Prefix
from smpart.bench.source import TraceOptions, open_load, random_prompt
from smpart.bench.synthetic import KINDS, synthetic
from smpart.errors import UsageError


def load(*times: float, lengths: tuple[int, int] = (10, 4)) -> Load:
    return Load("test", tuple(Arrival(t, *lengths) for t in times))


def test_rates_by_hand() -> None:
    given_load = load(0.0, 1.0, 2.0, 6.0)
    assert given_load.rate == 0.5
    assert [a.time_s for a in given_load.at_rate(1.0).arrivals] == [0.0, 0.5, 1.0, 3.0]
    assert [a.time_s for a in given_load.sped_up(4.0).arrivals] == [0.0, 0.25, 0.5, 1.5]
    assert len(given_load.first(2).arrivals) == 2


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: x.at_rate(0.0), "--rate 0"),
        (lambda x: x.at_rate(float("nan")), "--rate nan"),
        (lambda x: x.sped_up(-1.0), "--speedup"),
        (lambda x: x.first(0), "--limit 0"),
        (lambda x: x.scaled(0.0), "--scale 0"),
        (lambda x: x.scaled(1.5), "--scale 1.5"),
        (lambda x: load(1.0, 1.0).at_rate(2.0), "all requests of test arrive at once"),
    ],
)
def test_bad_options(call: object, message: str) -> None:
    assert callable(call)
    with pytest.raises(UsageError, match=message):
        call(load(0.0, 1.0))


def test_lengths_only_get_poisson_arrivals_at_the_rate() -> None:
    plain = Load("lengths", tuple(Arrival(0.0, 5, 5) for _ in range(400)), timed=False)
    timed = plain.at_rate(2.0, seed=3)
    assert timed.rate == pytest.approx(2.0) and timed.timed and timed != plain.at_rate(2.0, seed=4)
    assert timed == plain.at_rate(2.0, seed=3)
    assert any("Poisson" in note for note in timed.notes)


def test_clipping_counts_and_fits() -> None:
    mixed = Load("x", (Arrival(0, 5, 5), Arrival(1, 100, 10), Arrival(2, 10, 100), Arrival(3, 100, 100)))
    clipped = mixed.clipped(40)
    assert [(a.prompt_tokens, a.output_tokens) for a in clipped.arrivals] == [(5, 5), (30, 10), (10, 30), (20, 20)]
    assert clipped.longer_than(40) == 0 and "3 of 4 requests clipped" in clipped.notes[-1]
    assert mixed.clipped(1000).notes == ()


@settings(max_examples=40)
@given(st.integers(1, 5), st.integers(1, 1000), st.fractions(Fraction(1, 50), 1), st.integers(1, 64))
def test_prefix_hashes_agree_with_shared_tokens(same: int, tokens: int, scale: Fraction, block: int) -> None:
    """Two prompts that share `same` trace blocks share exactly the KV blocks that lie inside the equal tokens."""
    size = 128 * scale
    count = -(-tokens // size.__ceil__()) + 6
    pair = [Prefix(tuple(i if i < same else i + 1000 * (1 + k) for i in range(count)), size) for k in (0, 1)]
    tokens = min(tokens, int(count * size)) or 1
    prompts = [random_prompt(Arrival(0, tokens, 1, p), 0, 10**9, 5) for p in pair]
    hashes = [p.hashes(tokens, block) for p in pair]
    shared = sum(a == b for a, b in zip(*hashes, strict=True))
    equal = next((i for i, (a, b) in enumerate(zip(*prompts, strict=True)) if a != b), tokens)
    assert all(len(p) == tokens for p in prompts)
    assert len(hashes[0]) == tokens // block
    assert shared == min(equal // block, tokens // block)


def test_random_prompts_are_unique_and_seeded() -> None:
    arrival = Arrival(0, 50, 1)
    assert random_prompt(arrival, 1, 1000, 0) == random_prompt(arrival, 1, 1000, 0)
    assert random_prompt(arrival, 1, 1000, 0) != random_prompt(arrival, 2, 1000, 0)
    assert random_prompt(arrival, 1, 1000, 0) != random_prompt(arrival, 1, 1000, 1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("arrivals", ["", ":poisson", ":bursty"])
def test_synthetic_loads(kind: str, arrivals: str) -> None:
    name = f"synth:{kind}{arrivals}"
    made = synthetic(name, 300, 100_000, seed=1)
    assert made.rate == pytest.approx(1.0) and made.arrivals[0].time_s == 0.0
    assert made == synthetic(name, 300, 100_000, seed=1) != synthetic(name, 300, 100_000, seed=2)
    small = synthetic(name, 300, 256, seed=1)
    assert small.longer_than(256) == 0 and any("scaled by" in note for note in small.notes)


def test_bursts_are_denser_than_poisson() -> None:
    def near(name: str) -> int:
        times = [a.time_s for a in synthetic(name, 600, 10_000).arrivals]
        return sum(b - a < 0.05 for a, b in pairwise(times))

    assert near("synth:chat:bursty") > 5 * near("synth:chat")


@pytest.mark.parametrize("trace", ["synth:poetry", "synth:chat:sometimes", "synth:", "nowhere.jsonl", ""])
def test_unknown_traces_are_refused_with_what_exists(trace: str) -> None:
    with pytest.raises(UsageError, match=r"synth:"):
        open_load(TraceOptions(trace), 1000, 10)


def test_open_load_scales_and_limits() -> None:
    full = open_load(TraceOptions("synth:longdoc", limit=40), 100_000, 10)
    tenth = open_load(TraceOptions("synth:longdoc", limit=40, scale=0.1), 100_000, 10)
    assert len(full.arrivals) == 40 and len(open_load(TraceOptions("synth:longdoc"), 100_000, 10).arrivals) == 10
    for a, b in zip(full.arrivals, tenth.arrivals, strict=True):
        assert abs(b.prompt_tokens - a.prompt_tokens / 10) <= 1


@given(st.integers(1, 40), st.integers(1, 12), st.integers(0, 9))
def test_windows_are_runs_of_the_trace_that_never_overlap(total: int, count: int, number: int) -> None:
    whole = load(*(float(k * k) for k in range(total)), lengths=(10, 4))
    part = whole.window(number, count)
    again = f"seed {number} replays window"
    assert any(again in note for note in part.notes) == (number >= max(1, total // count))
    if count >= total:
        assert part.arrivals == whole.arrivals
        return
    first = number % (total // count) * count
    times = [whole.arrivals[first + k].time_s for k in range(count)]
    assert [a.time_s for a in part.arrivals] == pytest.approx([time - times[0] for time in times])


def test_a_seed_is_a_window_of_a_recorded_trace(tmp_path) -> None:
    path = tmp_path / "lengths.csv"
    rows = "".join(f"{10 + k},4\n" for k in range(9))
    path.write_text("num_prefill_tokens,num_decode_tokens\n" + rows)
    lengths = [
        [a.prompt_tokens for a in open_load(TraceOptions(str(path), limit=3, seed=seed), 100, 3).arrivals]
        for seed in range(4)
    ]
    assert lengths == [[10, 11, 12], [13, 14, 15], [16, 17, 18], [10, 11, 12]]
