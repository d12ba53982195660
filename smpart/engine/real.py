"""A deployment in real time: a transformers model in memory that lane workers share."""

from __future__ import annotations

import contextlib
import logging
import math
from typing import TYPE_CHECKING, Any

from smpart.engine.deployment import Deployment
from smpart.errors import UsageError
from smpart.kvcache import KVConfig, KVLayout, pool_blocks
from smpart.partition import Lanes
from smpart.partition.cgroups import memory_available
from smpart.partition.cores import Cores
from smpart.predictor import OnlinePredictor, RooflinePrior
from smpart.profiler.probe import Probe, Prober, first_look
from smpart.runtime.adapter import ModelAdapter, model_shape
from smpart.runtime.board import Board
from smpart.runtime.model_worker import ModelArgs, model_lanes
from smpart.runtime.models import load_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_log = logging.getLogger(__name__)

_LEAD_S = 0.01
"""A worker is handed its next work this long before it is predicted to run dry: a few times the way to it."""

_LOOK_S = 6.0
"""Seconds that the first look at the device may take."""


def load(model: str, dtype: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | None]:
    """Load a model by name. Raises `UsageError` for an unknown one."""
    return load_model(model, dtype=dtype)
