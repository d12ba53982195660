"""Synthetic loads ``synth:KIND[:poisson|:bursty]``: seeded lengths and arrivals at one request per second.

Kinds, in tokens before they are fitted to a model's context (log-normal: median and sigma):

* ``chat``: prompts 300 (1.0), answers 120 (0.7): the shape of ShareGPT-like conversation traces.
* ``code``: prompts 1500 (1.0), answers 25 (0.6): long context, short completion, as in Azure's code trace.
* ``longdoc``: questions of 60 (0.6) tokens, every fourth request a document of 4000 (0.5); answers 60 (0.5).

``poisson`` (default) has independent arrivals; ``bursty`` has Poisson bursts of a geometric number of requests (mean 6)
that arrive within a tenth of a mean gap of each other.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from smpart.bench.load import Arrival, Load
from smpart.errors import UsageError

BURST = 6.0
"""Mean requests in a burst."""


@dataclass(frozen=True, slots=True)
class _Lengths:
    """A log-normal of tokens, cut at `most` times the median."""

    median: float
    sigma: float
    most: float = 8.0

    def draw(self, rng: np.random.Generator, count: int) -> NDArray[np.float64]:
        return np.minimum(self.median * np.exp(self.sigma * rng.standard_normal(count)), self.most * self.median)


@dataclass(frozen=True, slots=True)
class _Kind:
    prompts: _Lengths
    outputs: _Lengths
    documents: _Lengths | None = None
    every: int = 4

    @property
    def longest(self) -> float:
        """Tokens of the longest request this kind can draw."""
        longest = max(k.median * k.most for k in (self.prompts, self.documents) if k)
        return longest + self.outputs.median * self.outputs.most


KINDS = {
    "chat": _Kind(_Lengths(300, 1.0), _Lengths(120, 0.7, 4.0)),
    "code": _Kind(_Lengths(1500, 1.0, 5.0), _Lengths(25, 0.6, 4.0)),
    "longdoc": _Kind(_Lengths(60, 0.6), _Lengths(60, 0.5, 4.0), _Lengths(4000, 0.5, 1.9)),
}
ARRIVALS = ("poisson", "bursty")


def synthetic(name: str, count: int, max_len: int, seed: int = 0) -> Load:
    """`count` requests of the kind and arrivals that `name` asks for, at one request per second.

    Lengths shrink in proportion where the longest possible request would not fit into `max_len` tokens; the
    load's notes say so. Raises `UsageError` for an unknown name.
    """
    kind_name, _, arrivals = name.removeprefix("synth:").partition(":")
    arrivals = arrivals or "poisson"
    if not name.startswith("synth:") or kind_name not in KINDS or arrivals not in ARRIVALS:
        raise UsageError(f"trace {name!r}: use synth:{{{','.join(KINDS)}}} with :poisson (default) or :bursty")
    if count < 1:
        raise UsageError(f"--limit {count}: must be at least 1")
    kind, rng = KINDS[kind_name], np.random.default_rng(seed)
    prompts, outputs = kind.prompts.draw(rng, count), kind.outputs.draw(rng, count)
    if kind.documents is not None:
        document = np.arange(count) % kind.every == kind.every - 1
        prompts = np.where(document, kind.documents.draw(rng, count), prompts)
    times = _bursty(rng, count) if arrivals == "bursty" else _poisson(rng, count)
    fit = min(1.0, (max_len - 2) / kind.longest)
    lengths = np.maximum(1, np.floor(np.stack([prompts, outputs]) * fit)).astype(int)
    notes = [f"{name}: {count} requests, {arrivals} arrivals, seed {seed}"]
    if fit < 1.0:
        notes.append(f"{name}: lengths scaled by {fit:.3g} to fit the model's {max_len} tokens")
    rows = zip(times.tolist(), *lengths.tolist(), strict=True)
    load = Load(name, tuple(Arrival(t, int(p), int(o)) for t, p, o in rows), notes=tuple(notes))
    return load.at_rate(1.0)


def _poisson(rng: np.random.Generator, count: int) -> NDArray[np.float64]:
    gaps: NDArray[np.float64] = rng.exponential(1.0, count)
    gaps[0] = 0.0
    return gaps.cumsum()


def _bursty(rng: np.random.Generator, count: int) -> NDArray[np.float64]:
    burst = np.cumsum(rng.random(count) < 1.0 / BURST)
    starts = np.cumsum(rng.exponential(BURST, int(burst[-1]) + 1))
    times: NDArray[np.float64] = np.sort(starts[burst] + rng.uniform(0.0, 0.1, count))
    times -= times[0]
    return times
