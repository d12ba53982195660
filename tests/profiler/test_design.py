"""What is measured, and in which order: the whole space, its ends first, nothing twice, the dear made affordable."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from toy_sweep import cost, works

from smpart.errors import UsageError
from smpart.partition import Shape, Split
from smpart.partition.feasible import feasible_splits
from smpart.profiler.design import SHARES, Choice, Design
from smpart.profiler.forecast import Forecast
from smpart.profiler.sample import Point, Sample
from smpart.profiler.space import DIMENSIONS, Kind, Space, covering
from smpart.profiler.works import Works

CONTENDERS = ("dram", "l2")


def space(units: int = 4, contenders: tuple[str, ...] = (), **limits: int) -> Space:
    return Space.of(works(), feasible_splits(units), contenders=contenders, **limits)


def forecast() -> Forecast:
    return Forecast(lambda shape, units, beside: cost(shape, units, beside, 0))


def design(within: Space | None = None, seed: int = 0, dearest: float = 1e9) -> Design:
    return Design(within or space(), seed, forecast(), dearest)


def first(made: Design, count: int) -> list[Choice]:
    return [choice for choice in itertools.islice(iter(made.fill, None), count) if choice is not None]


def fits(made: Works, choice: Choice) -> None:
    """The board has room for it: raises if not."""
    e = choice.experiment
    made.hybrid(e.split, e.chunks, e.rows, e.context)


@given(st.sampled_from(Kind), st.lists(st.floats(0, 1), min_size=DIMENSIONS, max_size=DIMENSIONS), st.integers(2, 30))
def test_every_point_of_the_cube_is_an_experiment_that_fits(kind: Kind, at: list[float], units: int) -> None:
    made = works()
    within = Space.of(made, feasible_splits(units), 300, 200, 7, CONTENDERS)
    experiment = within.experiment(kind, np.array(at))
    assert Kind.of(experiment) is kind
    made.hybrid(experiment.split, experiment.chunks, experiment.rows, experiment.context)
    assert experiment.prefill.tokens <= 300 and experiment.rows <= 7
    assert experiment.context <= 200 and all(old <= 200 for _, old in experiment.chunks)
    assert all(point.units >= 1 for point in experiment.points())
    if kind is Kind.HYBRID:
        assert experiment.split == Split(0, units)


def test_the_ends_of_the_space_come_first() -> None:
    choices = first(design(space(max_prompt=400, max_context=300, max_batch=8)), 150)
    shapes = [point.shape for choice in choices for point in choice.experiment.points()]
    alone = [shape for shape in shapes if not shape.hybrid]
    assert {shape.prefill_tokens for shape in alone} >= {1, 400}
    assert {(s.decode_batch, s.decode_context) for s in alone if s.decode_batch} >= {(1, 8), (1, 300), (8, 64)}
    units = {(bool(p.shape.prefill_tokens), p.units) for c in choices for p in c.experiment.points() if p.alone}
    assert units >= {(phase, count) for phase in (True, False) for count in (1, 2, 3, 4)}


def test_nothing_twice_and_the_same_again_for_the_same_seed() -> None:
    choices = [choice.experiment for choice in first(design(seed=3), 150)]
    assert [choice.experiment for choice in first(design(seed=3), 150)] == choices
    assert [choice.experiment for choice in first(design(seed=4), 150)] != choices
    assert len({experiment.key for experiment in choices}) == 150


def test_what_was_measured_before_is_not_chosen_again() -> None:
    before = first(design(), 40)
    samples = [Sample(point, (1e-2,)) for choice in before for point in choice.experiment.points()]
    again = design()
    again.remember(samples)
    known = {point for choice in before for point in choice.experiment.points()}
    assert all(not known.issuperset(choice.experiment.key) for choice in first(again, 100))


def test_kinds_have_their_shares_of_the_time() -> None:
    made, spent = design(space(contenders=CONTENDERS)), Counter[Kind]()
    for choice in first(made, 200):
        made.spent(choice, 2 * choice.cost)
        spent[Kind.of(choice.experiment)] += 2 * choice.cost
    for kind, share in SHARES.items():
        assert spent[kind] / spent.total() == pytest.approx(share / sum(SHARES.values()), abs=0.05)
    beside = sum(seconds for kind, seconds in spent.items() if kind.beside)
    assert 0.4 < beside / spent.total() < 0.6


def test_the_space_is_filled_evenly() -> None:
    prefills = [
        c.experiment for c in first(design(space(max_prompt=400)), 300) if Kind.of(c.experiment) is Kind.PREFILL
    ]
    places = np.log([e.prefill.tokens for e in prefills]) / np.log(400)
    counts, _ = np.histogram(places, 4, (0.25, 1.0))
    assert counts.min() > 0.5 * counts.mean()
    assert 0.3 < np.mean([e.prefill.prefill_context == 0 for e in prefills]) < 0.75
    assert {len(e.chunks) for e in prefills} == {1, 2, 3, 4}


def test_what_would_take_too_long_is_made_smaller() -> None:
    made = design(dearest=0.05)
    for choice in first(made, 80):
        fits(works(), choice)
        longest = max(cost(p.shape, p.units, p.neighbour, 0) for p in choice.experiment.points())
        assert 3 * longest <= 0.05 or (choice.experiment.prefill.tokens <= 1 and choice.experiment.rows <= 1)


def test_an_exhausted_space_ends() -> None:
    tiny = space(2, max_prompt=1, max_context=1, max_batch=1)
    assert 1 <= len(first(design(tiny), 500)) < 30


def test_one_unit_cannot_be_shared() -> None:
    alone = Space.of(works(), feasible_splits(1))
    assert alone.kinds() == (Kind.PREFILL, Kind.DECODE, Kind.HYBRID)
    assert all(not choice.experiment.beside for choice in first(design(alone), 40))


@pytest.mark.parametrize("units", [1, 2, 3, 132])
def test_a_few_splits_stand_for_many(units: int) -> None:
    splits = feasible_splits(units, *((8, 8) if units > 8 else ()))
    chosen = covering(splits, 6)
    assert len(chosen) == min(6, len(splits)) and {splits[0], splits[-1]} <= set(chosen)
    assert list(chosen) == sorted(chosen)
    shared = [split for split in splits if not split.exclusive]
    assert not shared or {shared[0], shared[-1]} <= set(chosen)


def far(samples: object, points: list[Point]) -> np.ndarray:
    """Unsure about long prefills only."""
    return np.array([float(point.shape.prefill_tokens >= 100) for point in points])


def test_doubtful_ones_come_first_and_differ() -> None:
    made = design()
    chosen = made.doubtful([], far, 6.0)
    assert len(chosen) >= 4 and all(choice.stage == "active" for choice in chosen)
    assert min(choice.experiment.prefill.tokens for choice in chosen) >= 100
    assert len({choice.experiment.key for choice in chosen}) == len(chosen)
    assert len({choice.experiment.split for choice in chosen}) >= 2
    assert sum(choice.cost for choice in chosen[:-1]) <= 6.0


def test_the_kind_whose_turn_it_is_is_asked_about() -> None:
    made = design()
    kinds = [Kind.of(choice.experiment) for _ in range(12) for choice in made.doubtful([], alike, 3.0)]
    assert set(kinds) == {Kind.PREFILL, Kind.DECODE, Kind.HYBRID, Kind.PAIR}


def alike(samples: object, points: list[Point]) -> np.ndarray:
    return np.ones(len(points))


def test_doubt_is_weighed_against_the_time_it_takes() -> None:
    everywhere = design().doubtful([], alike, 20.0)
    dear = max(everywhere, key=lambda choice: choice.cost)
    assert everywhere.index(dear) > len(everywhere) // 3


def test_without_any_doubt_nothing_is_chosen_by_it() -> None:
    assert design().doubtful([], lambda samples, points: np.zeros(len(points)), 1.0) == []


def test_a_forecast_is_put_right_by_what_was_measured() -> None:
    wrong = Forecast(lambda shape, units, beside: cost(shape, units, beside, 0) / 7)
    points = [Point(Shape.prefill([(n, 0)]), 2) for n in (10, 40, 160)]
    assert wrong(points[1]) == pytest.approx(cost(points[1].shape, 2, Shape(), 0) / 7)
    for point in points:
        wrong.learn(point, cost(point.shape, 2, Shape(), 0))
    other = Point(Shape.prefill([(80, 0)]), 2)
    assert wrong(other) == pytest.approx(cost(other.shape, 2, Shape(), 0), rel=1e-6)


@pytest.mark.parametrize(
    ("limits", "why"),
    [({"max_prompt": 600}, "max_prompt=600: there is room for 511"), ({"max_batch": 0}, "must be at least 1")],
)
def test_limits_that_cannot_be(limits: dict[str, int], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        space(**limits)
