"""Handicapped predictors: what they tell, against what the whole one tells."""

from __future__ import annotations

import numpy as np
import pytest

from smpart.bench.handicaps import Skewed, Unguarded, Unlearning, Wrong
from smpart.partition import Shape, Split, open_backend
from smpart.predictor import OnlinePredictor, RooflinePrior
from smpart.predictor.estimate import NOTHING
from smpart.sim.models import MODELS

BACKEND = open_backend("sim:h100-roofline")
PRIOR = RooflinePrior(MODELS["llama-3.1-8b"], BACKEND.device())
STEP, HEAD = Shape.decode(8, 8000), Shape.prefill([(512, 0)])
SPLITS = tuple(split for split in BACKEND.splits() if not split.exclusive)


def taught(predictor: OnlinePredictor) -> OnlinePredictor:
    for _ in range(20):
        predictor.observe(STEP, 132, NOTHING, 1.0, 3.0 * PRIOR.seconds(STEP, 132))
    return predictor.copy()


def test_one_that_does_not_learn_says_what_it_said() -> None:
    said = Unlearning(PRIOR).predict(STEP, 132)
    assert taught(Unlearning(PRIOR)).predict(STEP, 132) == said
    assert taught(OnlinePredictor(PRIOR)).predict(STEP, 132).mean == pytest.approx(3.0 * said.mean, rel=0.05)


def test_one_without_a_guard_expects_the_same() -> None:
    whole, bare = taught(OnlinePredictor(PRIOR)), taught(Unguarded(PRIOR))
    assert bare.predict(STEP, 132).upper == bare.predict(STEP, 132).mean == whole.predict(STEP, 132).mean
    sides, told = bare.predict_splits(STEP, HEAD, SPLITS), whole.predict_splits(STEP, HEAD, SPLITS)
    np.testing.assert_allclose(sides.step_upper, told.step)
    np.testing.assert_allclose(sides.head_upper, told.head)


@pytest.mark.parametrize("factor", [0.5, 1.5])
def test_one_that_is_wrong_stays_wrong_by_as_much(factor: float) -> None:
    whole, wrong = taught(OnlinePredictor(PRIOR)), taught(Wrong(PRIOR, factor, 1.0 / factor))
    for shape, times in ((STEP, 1.0 / factor), (HEAD, factor), (STEP.join(HEAD), factor)):
        np.testing.assert_allclose(wrong.predict(shape, 132), np.multiply(whole.predict(shape, 132), times))
    sides, told = wrong.predict_splits(STEP, HEAD, SPLITS), whole.predict_splits(STEP, HEAD, SPLITS)
    np.testing.assert_allclose(sides.step, told.step / factor)
    np.testing.assert_allclose(sides.head_upper, told.head_upper * factor)
    assert Split(8, 124) in SPLITS


def test_a_skewed_prior_is_mended_by_what_is_observed() -> None:
    skewed, true = OnlinePredictor(Skewed(PRIOR, 0.7, 1.5)), OnlinePredictor(PRIOR)
    for shape, times in ((STEP, 1.5), (HEAD, 0.7)):
        assert skewed.predict(shape, 132).mean == pytest.approx(times * true.predict(shape, 132).mean)
    sides, told = skewed.predict_splits(STEP, HEAD, SPLITS), true.predict_splits(STEP, HEAD, SPLITS)
    np.testing.assert_allclose(sides.step, 1.5 * told.step)
    np.testing.assert_allclose(sides.head, 0.7 * told.head)
    assert taught(skewed).predict(STEP, 132).mean == pytest.approx(taught(true).predict(STEP, 132).mean, rel=0.05)
