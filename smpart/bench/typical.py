"""The middle of a load in figures: what the shapes of one step and one prefill are taken to be."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Self

from smpart.bench.load import Arrival, Load
from smpart.partition import Shape
from smpart.partition.sim import Cost
from smpart.predictor.estimate import NOTHING

_BATCH = 32
"""Decode batch at which a device's throughput is guessed."""


@dataclass(frozen=True, slots=True)
class Typical:
    """Tokens, rounded means.

    Attributes:
        prompt: of a whole prompt.
        fresh: of it, what no earlier request began with.
        answer: of an answer.
        context: that a decoding sequence attends to, over all its steps and all sequences.
    """

    prompt: int
    fresh: int
    answer: int
    context: int

    @classmethod
    def of(cls, load: Load) -> Self:
        """That of a load.

        >>> Typical.of(Load("", (Arrival(0.0, 100, 10), Arrival(1.0, 200, 30))))
        Typical(prompt=150, fresh=150, answer=20, context=188)
        """
        arrivals = load.arrivals
        tokens = sum(a.output_tokens for a in arrivals)
        attended = sum(a.output_tokens * (a.prompt_tokens + a.output_tokens / 2) for a in arrivals)
        return cls(
            round(fmean(a.prompt_tokens for a in arrivals)),
            max(1, round(fmean(fresh_tokens(arrivals)))),
            round(fmean(a.output_tokens for a in arrivals)),
            max(1, round(attended / tokens)),
        )

    @property
    def head(self) -> Shape:
        """One prefill."""
        return Shape.prefill([(self.fresh, self.prompt - self.fresh)])

    def step(self, batch: int) -> Shape:
        """One decode step."""
        return Shape.decode(batch, batch * self.context)

    def most(self, cost: Cost, units: int, step_s: float) -> int:
        """The largest decode batch that a table need care about, by Little's law.

        That of the rate which the device could keep up with in steps of `step_s` seconds, twice over for bursts.
        """
        return max(1, math.ceil(2.0 * self.rate(cost, units) * self.answer * step_s))

    def rate(self, cost: Cost, units: int) -> float:
        """Requests a second if each phase had the whole device in turn, decode in a batch of 32."""
        prefill = cost(self.head, units, NOTHING, 0)
        decode = self.answer * cost(self.step(_BATCH), units, NOTHING, 0) / _BATCH
        return 1.0 / (prefill + decode)


def fresh_tokens(arrivals: Sequence[Arrival]) -> list[int]:
    """Prompt tokens of each request that a cache which forgets nothing would not have; at least 1."""
    seen: set[int] = set()
    fresh = []
    for arrival in arrivals:
        known = 0
        if arrival.prefix is not None:
            bounds = arrival.prefix.bounds(arrival.prompt_tokens)
            for trace_id, stop in zip(arrival.prefix.ids, bounds[1:], strict=False):
                if trace_id not in seen:
                    break
                known = stop
            seen.update(arrival.prefix.ids)
        fresh.append(max(1, arrival.prompt_tokens - known))
    return fresh
