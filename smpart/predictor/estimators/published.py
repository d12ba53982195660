"""The forms that other systems published, by name."""

from __future__ import annotations

from collections.abc import Mapping

from smpart.predictor.estimators.base import LatencyEstimator
from smpart.predictor.estimators.bullet import Bullet
from smpart.predictor.estimators.muxwise import MuxWise
from smpart.predictor.estimators.nexus import Nexus
from smpart.predictor.estimators.semipd import SemiPD

PUBLISHED: Mapping[str, type[LatencyEstimator]] = {
    "muxwise": MuxWise,
    "bullet": Bullet,
    "nexus": Nexus,
    "semipd": SemiPD,
}
"""All take ``(model, units)`` and are fitted to the same matrices as smpart's own."""
