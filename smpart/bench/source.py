"""From what the user wrote after ``--trace`` to a `Load`, and from a load to prompts a core can be given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from smpart.bench.load import Arrival, Load
from smpart.bench.synthetic import ARRIVALS, KINDS, synthetic
from smpart.bench.tracefile import read_trace
from smpart.errors import UsageError


@dataclass(frozen=True, slots=True)
class TraceOptions:
    """How a load is taken from its source: the options of ``smpart bench`` of the same names.

    Of a recorded trace, seed *n* with a limit means the *n*-th window of so many requests (0: the first ones).
    """

    trace: str
    limit: int | None = None
    scale: float = 1.0
    clip: bool = False
    time_unit: str = "auto"
    seed: int = 0

    @property
    def synthetic(self) -> bool:
        """Whether the load is drawn, not recorded."""
        return self.trace.startswith("synth:")


def open_load(options: TraceOptions, max_len: int, default_count: int) -> Load:
    """The load as asked, not yet brought to a rate.

    Args:
        options: what the user asked for.
        max_len: longest prompt and answer together that the model takes, in tokens.
        default_count: requests of a synthetic load for which no limit is given.

    Raises:
        UsageError: no such trace, a broken row, a bad option.
    """
    if options.synthetic:
        if options.time_unit != "auto":
            raise UsageError(f"--time-unit {options.time_unit}: a synthetic load has no recorded times")
        count = default_count if options.limit is None else options.limit
        load = synthetic(options.trace, count, max_len, options.seed)
    elif (path := Path(options.trace)).is_file():
        load = read_trace(path, options.time_unit)
        load = load if options.limit is None else load.window(options.seed, options.limit)
    else:
        kinds = ", ".join(f"synth:{kind}" for kind in KINDS)
        raise UsageError(
            f"trace {options.trace!r}: no such file; give a Mooncake .jsonl, an Azure .csv, a lengths .csv, "
            f"or one of {kinds} (with {' or '.join(':' + a for a in ARRIVALS)})"
        )
    if options.scale != 1.0:
        load = load.scaled(options.scale)
    return load.clipped(max_len) if options.clip else load


def random_prompt(arrival: Arrival, index: int, vocab: int, seed: int) -> Sequence[int]:
    """Token ids of one prompt: unique to the arrival, but for the beginnings that the trace says are shared.

    The same trace block always gives the same tokens, whoever's prompt it is in.
    """
    if arrival.prefix is None:
        rng = np.random.default_rng([seed, 1, index])
        return [int(t) for t in rng.integers(0, vocab, arrival.prompt_tokens)]
    tokens: list[int] = []
    bounds = arrival.prefix.bounds(arrival.prompt_tokens)
    for trace_id, start, stop in zip(arrival.prefix.ids, bounds, bounds[1:], strict=False):
        rng = np.random.default_rng([seed, 0, trace_id])
        tokens.extend(int(t) for t in rng.integers(0, vocab, stop - start))
    return tokens
