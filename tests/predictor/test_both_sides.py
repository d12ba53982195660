"""All splits at once say what one split after another says."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from profiled import tables

from smpart.partition import Shape
from smpart.partition.registry import open_backend
from smpart.predictor import OnlinePredictor, RooflinePrior
from smpart.predictor.estimate import split_by_split
from smpart.sim.models import MODELS

BACKEND, MODEL = open_backend("sim:h100"), MODELS["llama-3.1-8b"]
SPLITS = tuple(split for split in BACKEND.splits() if not split.exclusive)
MADE = tables(MODEL, BACKEND.device(), (16, 64, 132))
for name in ("prefill_beside", "decode_beside"):
    MADE.arrays()[name] += np.linspace(0.0, 0.5, 27).reshape(3, 3, 3)
MADE.arrays()["prefill_packed"][...] += 0.2
MADE = type(MADE)(MADE.arrays())
STEPS = st.builds(lambda rows, each: Shape.decode(rows, rows * each), st.integers(1, 4000), st.integers(1, 200_000))
CHUNKS = st.tuples(st.integers(1, 100_000), st.integers(0, 200_000))
HEADS = st.lists(CHUNKS, min_size=1, max_size=24).map(Shape.prefill)


@settings(max_examples=60)
@given(STEPS, HEADS, st.integers(0, 2**32), st.integers(0, 200))
@pytest.mark.parametrize("prior", [MADE, RooflinePrior(MODEL, BACKEND.device())], ids=["tables", "roofline"])
def test_as_split_by_split(prior, step: Shape, head: Shape, seed: int, seen: int) -> None:
    predictor, rng = OnlinePredictor(prior, profiled=True), np.random.default_rng(seed)
    for _ in range(seen):
        split = SPLITS[rng.integers(0, 3)]
        for shape, units, other in ((step, split.decode, head), (head, split.prefill, step)):
            beside = other if rng.random() < 0.7 else Shape()
            predictor.observe(shape, units, beside, 1.0, prior.seconds(shape, units) * np.exp(rng.normal(0.1, 0.1)))
    fast, slow = predictor.predict_splits(step, head, SPLITS), split_by_split(predictor, step, head, SPLITS)
    np.testing.assert_allclose(np.array(fast), np.array(slow), rtol=1e-9)


@pytest.mark.parametrize("prior", [MADE, RooflinePrior(MODEL, BACKEND.device())], ids=["tables", "roofline"])
def test_what_has_no_two_sides_is_refused(prior) -> None:
    predictor = OnlinePredictor(prior)
    step, head = Shape.decode(4, 400), Shape.prefill([(64, 0)])
    for wrong in ((head, head), (step, step), (step, Shape()), (Shape(), head)):
        with pytest.raises(ValueError, match="a decode step beside a prefill"):
            predictor.predict_splits(*wrong, SPLITS)
    with pytest.raises(ValueError, match="two lanes"):
        predictor.predict_splits(step, head, BACKEND.splits())


@pytest.mark.parametrize("prior", [MADE, RooflinePrior(MODEL, BACKEND.device())], ids=["tables", "roofline"])
def test_nothing_takes_no_more_than_anything(prior) -> None:
    predictor = OnlinePredictor(prior)
    nothing, step = predictor.predict(Shape(), 16), predictor.predict(Shape.decode(1, 1), 16)
    assert 0.0 <= nothing.mean <= nothing.upper <= step.upper
