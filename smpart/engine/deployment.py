"""A model placed on a pair of lanes, with its KV memory: what several engines or policies can run on in turn."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, cast

from smpart.engine.core import EngineCore
from smpart.engine.crossing import Crossing
from smpart.engine.profiles import Profile, Wanted
from smpart.errors import UnsupportedModel, UsageError
from smpart.kvcache import BlockPool, KVConfig
from smpart.partition import Backend, Device, Lanes, ModelShape
from smpart.partition.link import Link
from smpart.partition.registry import open_backend
from smpart.partition.sim import Sim
from smpart.predictor import OnlinePredictor
from smpart.predictor.artefact import Artefact
from smpart.profiler.fingerprint import Fingerprint
from smpart.profiler.probe import Probe
from smpart.runtime.board import Noticeboard
from smpart.scheduler.plan import AcrossDevices, Policy
from smpart.scheduler.registry import make_policy
from smpart.scheduler.slo import SLO

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_log = logging.getLogger(__name__)

_AUTO = "auto"

Pair = Callable[[float | None], tuple[Lanes, Noticeboard, Link]]
"""Makes lanes on two devices, a board for their requests, and the link of so many gigabits a second between them (None:
what such devices have)."""


@dataclass(eq=False, slots=True)
class Deployment:
    """Use `Deployment.open` or `Deployment.serve`; close it, or use it in a ``with`` statement.

    Attributes:
        name: the model, as asked for.
        backend: the backend that was opened (never ``auto``).
        virtual: whether its clock is virtual.
        dtype: element type of weights and KV, torch's name.
        predictor: what is known of this device's speed before the first request; each core gets a copy.
        probes: what was measured to know it.
        profile: the artefact that `predictor` predicts from; None: from physics and a first look.
        contradiction: what the first forwards say against the profile; None: nothing.
        lead_s: see `EngineCore`.
        gpus: devices that one lane's work is spread over (tensor parallelism).
        pair: two devices like this one, for policies that need one a lane; None: there is one only.
        max_len: longest prompt and answer together.
        generation_defaults: the model's own generation settings.
    """

    name: str
    backend: str
    virtual: bool
    lanes: Lanes
    board: Noticeboard
    kv: KVConfig
    blocks: int
    model_shape: ModelShape
    dtype: str
    predictor: OnlinePredictor
    lead_s: float
    gpus: int = 1
    pair: Pair | None = None
    eos: frozenset[int] = frozenset()
    tokenizer: PreTrainedTokenizerBase | None = None
    generation_defaults: Mapping[str, Any] = field(default_factory=dict)
    probes: Sequence[Probe] = ()
    profile: Artefact | None = None
    contradiction: str | None = None
    resources: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    @classmethod
    def open(
        cls,
        model: str,
        *,
        backend: str = "auto",
        kv: KVConfig | None = None,
        dtype: str = "auto",
        profile: Profile = "auto",
    ) -> Deployment:
        """Load a model by name and place it.

        Args:
            model: a local path or hub id, ``smollm2``, ``random:<family>``; with ``sim:<gpu>`` also the shapes
                of `smpart.sim.models` or any ``config.json``.
            backend: ``auto``, ``cores`` or ``sim:<gpu>``.
            dtype: element type of weights and KV, torch's name; ``auto``: float32, on simulated GPUs bfloat16.
            profile: what to predict from; see `smpart.engine.profiles.Profile`.

        Raises:
            UsageError: an unknown model or backend, limits that cannot hold, a profile of another machine or model.
            UnsupportedModel, BackendUnavailable, SmpartError: it cannot be served here; the message says why.
        """
        wanted, opened = Wanted.read(profile), _open(backend)
        if isinstance(opened, Sim):
            from smpart.engine.virtual import deploy_virtual

            return deploy_virtual(model, opened, kv or KVConfig(), "bfloat16" if dtype == _AUTO else dtype, wanted)
        from smpart.engine.real import deploy_real, warm_up
        from smpart.runtime.models import load_model

        warm_up()
        loaded, tokenizer = load_model(model, dtype="float32" if dtype == _AUTO else dtype)
        return deploy_real(loaded, tokenizer, opened, kv or KVConfig(), name=model, wanted=wanted)

    @classmethod
    def serve(
        cls,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        backend: str = "auto",
        kv: KVConfig | None = None,
        profile: Profile = "auto",
    ) -> Deployment:
        """Place a loaded model. Raises as `open` does."""
        if not hasattr(model, "config") or not callable(getattr(model, "generate", None)):
            raise UnsupportedModel(f"a {type(model).__name__} is no transformers causal language model")
        if kv is not None and not isinstance(kv, KVConfig):
            raise UsageError(f"kv must be a KVConfig, not {type(kv).__name__}")
        wanted, opened = Wanted.read(profile), _open(backend)
        if isinstance(opened, Sim):
            raise UsageError(f"backend {backend!r} only simulates: it serves no real model; try `smpart bench`")
        from smpart.engine.real import deploy_real

        return deploy_real(model, tokenizer, opened, kv or KVConfig(), name=type(model).__name__, wanted=wanted)

    @property
    def device(self) -> Device:
        """The device whose units the lanes share."""
        return self.lanes.device

    @property
    def fingerprint(self) -> Fingerprint:
        """What a profile must have been measured for to be good here."""
        return Fingerprint.of(self.backend, self.device, self.model_shape, self.dtype)

    @property
    def profile_facts(self) -> dict[str, object] | None:
        """The profile in use, for JSON, with what the first forwards said against it; None without one."""
        return None if self.profile is None else {**self.profile.about, "contradiction": self.contradiction}

    @property
    def profile_words(self) -> str:
        """The same in a line for people."""
        return "no profile: predictions from physics, corrected" if self.profile is None else self.profile.words

    @property
    def max_len(self) -> int:
        """Longest prompt and answer together, in tokens."""
        return self.board.max_len

    def core(self, policy: str | Policy, slo: SLO, *, seed: int = 0) -> EngineCore:
        """A fresh engine core on these lanes: empty pool and cache, the predictor as it was after the first look.

        One core at a time may use a deployment. Raises `UsageError` for an unknown policy, or one that needs what these
        lanes cannot do.
        """
        splits, overlapping = self.lanes.splits(), self.lanes.overlapping()
        made: object = policy
        if isinstance(policy, str):
            made = make_policy(policy, slo=slo, splits=splits, overlapping=overlapping)
        if not callable(getattr(made, "plan", None)):
            raise UsageError(f"policy={policy!r}: must be a policy's name, or an object with a plan method")
        lanes, board, crossing = self.lanes, self.board, None
        if isinstance(made, AcrossDevices):
            lanes, board, crossing = self._two_devices(made)
        return EngineCore(
            lanes,
            cast(Policy, made),
            self.predictor.copy(),
            BlockPool(self.blocks, self.kv.block_tokens),
            board,
            layers=self.model_shape.layers,
            lead_s=self.lead_s,
            eos=self.eos,
            prefix_cache=self.kv.prefix_cache,
            crossing=crossing,
            seed=seed,
        )

    def _two_devices(self, policy: AcrossDevices) -> tuple[Lanes, Noticeboard, Crossing]:
        if self.pair is None:
            raise UsageError(
                f"policy {policy.name} needs a device for prefill and another for decode, and {self.backend} is one: "
                "use --backend sim:<gpu>, which simulates both"
            )
        lanes, board, link = self.pair(policy.link_gbps)
        pool = BlockPool(self.blocks, self.kv.block_tokens)
        return lanes, board, Crossing(pool, link, self.model_shape.kv_token_bytes)

    def close(self) -> None:
        """End the workers and free the memory. Idempotent."""
        self.lanes.close()
        self.resources.close()

    def __enter__(self) -> Deployment:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def _open(backend: str) -> Backend:
    """A backend on which models can run."""
    from smpart.engine.staff import why_no_model

    return open_backend(backend, why_no_model)
