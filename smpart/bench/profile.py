"""`smpart profile`: measures a model on its lanes, alone and side by side, into a folder; then fits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from smpart.bench.host import host
from smpart.bench.noise import repeat_noise
from smpart.engine.deployment import Deployment
from smpart.engine.staff import why_no_model
from smpart.errors import UsageError, is_number
from smpart.kvcache import KVConfig
from smpart.partition import Backend, ModelShape
from smpart.partition.registry import open_backend
from smpart.partition.sim import Sim
from smpart.profiler.design import Doubt
from smpart.profiler.sample import Sample
from smpart.profiler.space import Space
from smpart.profiler.store import Store
from smpart.profiler.sweep import Progress, Sweep
from smpart.profiler.witness import NoWitness, witness_of
from smpart.profiler.works import MOST_CHUNKS, Works
from smpart.runtime.contender import KINDS
from smpart.runtime.models import load_positions

Figures = dict[str, Any]
Show = Callable[[float, str], None]
"""Called with the seconds gone, and a line on how far it is."""

_CPU_KV_BYTES = 1 << 30
"""KV memory on a CPU: what profiles are made on is often not idle."""


_LOUD = 0.25
"""Share of disturbed rounds that is worth a line."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How large forwards may be: new tokens, tokens attended to by one sequence, decode rows."""

    max_prompt: int
    max_context: int
    max_batch: int


LIMITS = {"cpu": Limits(2048, 2048, 32), "cuda": Limits(8192, 16384, 128), "sim": Limits(8192, 16384, 128)}
"""By kind of device, where the user says nothing."""


@dataclass(frozen=True, slots=True)
class Options:
    """What to profile.

    Attributes:
        minutes: of measuring, over all runs into the folder.
        seed: of every random choice. None, here and below: as the profile in the folder has it, or a default.
    """

    model: str
    folder: Path
    minutes: float
    backend: str = "auto"
    dtype: str = "auto"
    seed: int | None = None
    max_prompt: int | None = None
    max_context: int | None = None
    max_batch: int | None = None

    def check(self) -> None:
        """Raise `UsageError` for what cannot be."""
        if not is_number(self.minutes) or self.minutes <= 0:
            raise UsageError(f"--minutes {self.minutes}: must be a positive number")
        for name in ("max_prompt", "max_context", "max_batch"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"--{name.replace('_', '-')} {value}: must be at least 1")


def measure(
    options: Options,
    doubt: Callable[[ModelShape, int], Doubt],
    fit: Callable[[Path], Mapping[str, Any]],
    say: Callable[[str], None],
    budget: Callable[[str, float], AbstractContextManager[Show]],
) -> Figures:
    """Measure, or go on measuring, until the time is spent; then fit.

    Args:
        doubt: makes what tells where a model of these dimensions, on so many units, is unsure.
        fit: what is to be done with the folder.
        say: takes lines of log.
        budget: shows progress.

    Returns:
        What ``--json`` prints.

    Raises:
        UsageError: bad options, or a folder that holds the profile of something else.
        SmpartError: the model cannot be measured here; the message says why.
        KeyboardInterrupt: after saving what was measured.
    """
    options.check()
    backend = open_backend(options.backend, why_no_model)
    limits, seed = _settings(options, backend)
    with (
        Deployment.open(
            options.model,
            backend=backend.name,
            kv=_memory(options, backend, limits),
            dtype=options.dtype,
            profile="none",
        ) as deployment,
        Store.create(options.folder, deployment.fingerprint, {"seed": seed, **asdict(limits)}) as store,
    ):
        before = store.minutes
        if before > 0:
            say(f"going on with {options.folder}: {before:.1f} minutes measured so far")
        try:
            last = _sweep(deployment, store, limits, seed, options.minutes, doubt, budget)
        except KeyboardInterrupt:
            say(f"interrupted after {store.minutes:.1f} minutes: run it again with --out {options.folder} to go on")
            raise
        samples, minutes = store.samples(), store.minutes
        fingerprint = deployment.fingerprint
    if last is not None and last.suspect > _LOUD:
        say(f"other work disturbed {last.suspect:.0%} of the rounds: on a quiet machine the profile would be better")
    say(f"{len(samples)} samples in {minutes:.1f} minutes; fitting")
    return {
        "schema": 1,
        "command": "profile",
        "host": host(),
        "folder": str(options.folder),
        "fingerprint": fingerprint.digest,
        "minutes": round(minutes, 3),
        "minutes_before": round(before, 3),
        **_figures(samples),
        "round_noise": None if last is None else round(last.noise, 6),
        "suspect_rounds": None if last is None else round(last.suspect, 3),
        "seed": seed,
        "limits": asdict(limits),
        "fit": dict(fit(options.folder)),
    }


def _settings(options: Options, backend: Backend) -> tuple[Limits, int]:
    """As asked for; else as the folder's profile has them; else what fits the device and the model."""
    kept: Mapping[str, Any] = {}
    if (options.folder / "profile.json").exists():
        kept = Store.open(options.folder).configuration
    kind = backend.device().kind
    usual = asdict(LIMITS[kind])
    if kind != "sim":
        longest = load_positions(options.model) - 1
        usual = {**usual, **{name: min(usual[name], longest) for name in ("max_prompt", "max_context")}}
    asked = {name: getattr(options, name) for name in usual}
    chosen = {name: asked[name] or kept.get(name) or usual[name] for name in usual}
    seed = options.seed if options.seed is not None else int(kept.get("seed", 0))
    return Limits(**chosen), seed


def _memory(options: Options, backend: Backend, limits: Limits) -> KVConfig:
    """Room for the largest forward, and for the slots of both lanes."""
    longest = limits.max_prompt + limits.max_context + 1
    if not isinstance(backend, Sim):
        longest = min(longest, load_positions(options.model))
    return KVConfig(
        max_len=longest,
        max_requests=limits.max_batch + MOST_CHUNKS,
        memory_bytes=_CPU_KV_BYTES if backend.device().kind == "cpu" else None,
    )


def _sweep(
    deployment: Deployment,
    store: Store,
    limits: Limits,
    seed: int,
    minutes: float,
    doubt: Callable[[ModelShape, int], Doubt],
    budget: Callable[[str, float], AbstractContextManager[Show]],
) -> Progress | None:
    lanes, device = deployment.lanes, deployment.device
    works = Works(deployment.board, deployment.blocks, deployment.kv.block_tokens, seed)
    contenders = KINDS if device.kind == "cuda" else ()
    space = Space.of(works, lanes.splits(), limits.max_prompt, limits.max_context, limits.max_batch, contenders)
    sweep = Sweep(
        lanes,
        works,
        space,
        store,
        60 * minutes,
        seed=seed,
        expected=lambda shape, units, beside: deployment.predictor.predict(shape, units, beside).mean,
        doubt=doubt(deployment.model_shape, device.units),
        witness=NoWitness() if deployment.virtual else witness_of(lanes),
    )
    last = None
    with budget(f"profiling {deployment.name} on {deployment.backend}", 60 * minutes) as show:
        for last in sweep.run():
            show(
                last.spent_s,
                f"{last.stage}: {last.points} points, {last.disturbed} repeats redone, noise {last.noise:.1%}, "
                f"{last.left_s / 60:.1f} min left",
            )
    return last


def _figures(samples: list[Sample]) -> Figures:
    return {
        "samples": len(samples),
        "points": len({sample.point for sample in samples}),
        "repeats": sum(len(sample.seconds) for sample in samples),
        "disturbed": sum(sample.disturbed for sample in samples),
        "repeat_noise": repeat_noise(samples),
    }
