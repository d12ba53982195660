"""A deployment in real time: a transformers model in memory that lane workers share."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING

from smpart.engine.deployment import Deployment
from smpart.engine.profiles import NONE, Wanted, contradiction, predictor_of
from smpart.engine.staff import Hire, Job, hire
from smpart.errors import UnsupportedModel, UsageError
from smpart.kvcache import KVConfig, KVLayout
from smpart.partition import Backend
from smpart.predictor import OnlinePredictor, Rates, RooflinePrior, calibrate
from smpart.predictor.artefact import Artefact
from smpart.profiler.fingerprint import Fingerprint
from smpart.profiler.probe import Probe, first_look
from smpart.profiler.timer import Timer
from smpart.profiler.works import Works
from smpart.runtime.adapter import ModelAdapter, model_shape
from smpart.runtime.board import Board
from smpart.runtime.children import Zygote
from smpart.runtime.facts import ModelFacts
from smpart.runtime.processes import ProcessLanes
from smpart.runtime.sharing import share_weights

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_log = logging.getLogger(__name__)

_LEAD_S = 0.01
"""A worker is handed its next work this long before it is predicted to run dry: a few times the way to it."""

_LOOK_S = 5.0
"""About how long the first look at the device may take."""

_CHECKED = 3
"""Forwards of a first look that tell whether a profile is still true."""


def warm_up() -> None:
    """Begin what takes seconds and needs no model: the process that workers are forked from imports torch."""
    Zygote.shared()


def deploy_real(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    backend: Backend,
    kv: KVConfig,
    *,
    name: str,
    hire: Hire = hire,
    wanted: Wanted = NONE,
) -> Deployment:
    """Place a model on lane workers; measures a few forwards before it returns.

    Args:
        hire: finds the workers for a backend.
        wanted: the profile to predict from.

    Raises:
        UnsupportedModel: the model cannot be served correctly.
        UsageError: limits that cannot hold, or a profile of another machine or model.
        SmpartError: not enough memory, or the workers cannot start.
    """
    warm_up()
    adapter = ModelAdapter(model)
    adapter.detach()
    facts, shape = adapter.facts, model_shape(model)
    max_len, dtype = _max_len(kv, facts), _dtype(kv, facts)
    profile = wanted.choose(Fingerprint.of(backend.name, backend.device(), shape, dtype))
    layout = KVLayout(facts.layers, facts.kv_heads, facts.head_dim, dtype, kv.block_tokens)
    with contextlib.ExitStack() as resources:
        weights = share_weights(model)
        staff = hire(Job(weights, facts, layout, kv, max_len), backend, resources)
        board = Board.over(staff.segments["board"].buffer, kv.max_requests, max_len, kv.block_tokens)
        lanes = ProcessLanes(staff.crew, staff.segments, preload=weights.modules())
        resources.callback(lanes.close)
        deployment = Deployment(
            name=name,
            backend=backend.name,
            virtual=False,
            lanes=lanes,
            board=board,
            kv=kv,
            blocks=staff.blocks(),
            model_shape=shape,
            dtype=dtype,
            predictor=OnlinePredictor(RooflinePrior(shape, lanes.device)),
            profile=profile,
            lead_s=_LEAD_S,
            eos=_eos(model),
            tokenizer=tokenizer,
            generation_defaults=model.generation_config.to_dict() if model.generation_config is not None else {},
        )
        deployment.probes = _look(deployment) if profile is None else _check(deployment, profile, wanted.auto)
        deployment.resources = resources.pop_all()
    return deployment


def _look(deployment: Deployment) -> list[Probe]:
    """What forwards take here, as far as `_LOOK_S` allows: the predictor begins with it."""
    probes = list(_probes(deployment))
    alone = [(probe.shape, probe.units, probe.seconds) for probe in probes if not probe.neighbour.tokens]
    rates = calibrate(deployment.model_shape, Rates.guess(deployment.lanes.device), alone)
    deployment.predictor = OnlinePredictor(RooflinePrior(deployment.model_shape, deployment.lanes.device, rates))
    _teach(deployment, probes)
    return probes


def _check(deployment: Deployment, profile: Artefact, auto: bool) -> list[Probe]:
    """Whether a profile is still true: a few forwards; where they contradict it, so must two more rounds of them.

    One that nobody asked for by name (`auto`) is not used if the contradiction is grave.
    """
    deployment.predictor = predictor_of(profile)
    prior, probes = deployment.predictor.prior, list(islice(_probes(deployment), _CHECKED))
    if contradiction(prior, probes):
        for _ in range(2):
            probes += islice(_probes(deployment), _CHECKED)
        if found := contradiction(prior, probes):
            source, again = profile.source or "the profile", "run `smpart profile` again, for longer"
            if auto and found.grave:
                _log.warning("profile auto: going on without %s: %s; %s", source, found.words, again)
                deployment.profile = None
                return _look(deployment)
            _log.warning("%s: %s; %s", source, found.words, again)
            deployment.contradiction = found.words
    _teach(deployment, probes)
    return probes


def _probes(deployment: Deployment) -> Iterator[Probe]:
    works = Works(deployment.board, deployment.blocks, deployment.kv.block_tokens)
    timer = Timer(deployment.lanes, works)
    return first_look(works, timer, deployment.lanes.splits(), _LOOK_S, deployment.lanes.now)


def _teach(deployment: Deployment, probes: Sequence[Probe]) -> None:
    for probe in probes:
        deployment.predictor.observe(probe.shape, probe.units, probe.neighbour, 1.0, probe.seconds)
        _log.debug("first look: %s on %d units takes %.1f ms", probe.shape, probe.units, probe.seconds * 1e3)


def _max_len(kv: KVConfig, facts: ModelFacts) -> int:
    if kv.max_len is not None and kv.max_len > facts.max_positions:
        raise UsageError(f"KVConfig.max_len={kv.max_len}: the model's context is {facts.max_positions} tokens")
    return kv.max_len or facts.max_positions


def _dtype(kv: KVConfig, facts: ModelFacts) -> str:
    own = str(facts.dtype).removeprefix("torch.")
    if kv.dtype not in ("auto", own):
        raise UnsupportedModel(f"KVConfig.dtype={kv.dtype!r}: this model's keys and values are {own}; use 'auto'")
    return own


def _eos(model: PreTrainedModel) -> frozenset[int]:
    """End-of-sequence ids, as transformers' own ``generate`` takes them."""
    config = model.generation_config if model.generation_config is not None else model.config
    ids = config.eos_token_id
    if ids is None:
        return frozenset()
    return frozenset([ids] if isinstance(ids, int) else ids)
