"""A load: which requests arrive when, and the ways to stretch, cut and scale it (told in `Load.notes`)."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from smpart.errors import UsageError


@dataclass(frozen=True, slots=True)
class Prefix:
    """What a trace says about shared prompt beginnings.

    Attributes:
        ids: one id a trace block, in order. Equal ids mean equal prompts up to the end of that block.
        block: prompt tokens in one trace block (a fraction once the lengths were scaled).
    """

    ids: tuple[int, ...]
    block: Fraction

    def bounds(self, tokens: int) -> list[int]:
        """First token of each trace block and, last, the end of the prompt."""
        return [min(tokens, math.ceil(i * self.block)) for i in range(len(self.ids))] + [tokens]

    def hashes(self, tokens: int, block_tokens: int) -> tuple[bytes, ...]:
        """One hash a full KV block of a prompt of `tokens` tokens; equal hashes mean an equal prompt up to there.

        A KV block is named after the trace block that holds its last token, so nothing is taken for shared that
        the trace does not vouch for.

        >>> a, b = Prefix((1, 2), Fraction(32)), Prefix((1, 3), Fraction(32))
        >>> [x == y for x, y in zip(a.hashes(64, 16), b.hashes(64, 16))]
        [True, True, False, False]
        """
        up, down = self.block.numerator, self.block.denominator  # whole numbers: a long trace has millions of blocks
        last = len(self.ids) - 1
        holders = (((i + 1) * block_tokens - 1) * down // up for i in range(tokens // block_tokens))
        names = (f"{self.ids[min(holder, last)]}:{i}" for i, holder in enumerate(holders))
        return tuple(hashlib.blake2b(name.encode(), digest_size=16).digest() for name in names)


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a load.

    Attributes:
        time_s: when it arrives, in seconds from the first arrival.
        prompt_tokens: prompt length, >= 1.
        output_tokens: tokens to produce, >= 1.
        prefix: what is known of prompt beginnings shared with other arrivals; None: nothing is shared.
        text: the prompt itself, where the load has one.
    """

    time_s: float
    prompt_tokens: int
    output_tokens: int
    prefix: Prefix | None = None
    text: str | None = None


@dataclass(frozen=True, slots=True)
class Load:
    """Arrivals in order of time, the first at 0.

    Attributes:
        name: as the user wrote it.
        timed: whether the times mean anything; False: lengths only, `at_rate` must set them.
        notes: one line for each thing that was decided or changed on the way.
    """

    name: str
    arrivals: tuple[Arrival, ...]
    timed: bool = True
    notes: tuple[str, ...] = ()

    @property
    def rate(self) -> float:
        """Mean requests per second, ``(n - 1) / (last - first)``; infinite if all arrive at once."""
        span = self.arrivals[-1].time_s - self.arrivals[0].time_s
        return (len(self.arrivals) - 1) / span if span > 0 else math.inf

    def first(self, count: int) -> Load:
        """The first `count` requests. Raises `UsageError` if `count` < 1."""
        return self.window(0, count)

    def window(self, number: int, count: int) -> Load:
        """`count` requests from the `number`-th multiple of it on, the first of them at 0; windows recur at the end.

        Raises `UsageError` if `count` < 1.
        """
        if count < 1:
            raise UsageError(f"--limit {count}: must be at least 1")
        total = len(self.arrivals)
        windows = max(1, total // count)
        again = (f"seed {number} replays window {number % windows} again: {windows} of {count} requests are all",)
        notes = (*self.notes, *(again if number >= windows else ()))
        if count >= total:
            return dataclasses.replace(self, notes=notes)
        begin = number % windows * count
        part = self.arrivals[begin : begin + count]
        arrivals = tuple(dataclasses.replace(a, time_s=a.time_s - part[0].time_s) for a in part)
        note = (
            f"the first {count} of {total} requests"
            if begin == 0
            else f"requests {begin} to {begin + count} of {total}"
        )
        return dataclasses.replace(self, arrivals=arrivals, notes=(*notes, note))

    def at_rate(self, rate: float, seed: int = 0) -> Load:
        """Arrivals stretched evenly to `rate` requests per second; Poisson arrivals for a load of lengths only.

        Raises `UsageError` for a rate that is not positive, or a load whose requests all arrive at once.
        """
        if not (math.isfinite(rate) and rate > 0):
            raise UsageError(f"--rate {rate:g}: must be a positive number of requests per second")
        if not self.timed:
            gaps = np.random.default_rng(seed).exponential(1.0, len(self.arrivals))
            times = (np.cumsum(gaps) - gaps[0]).tolist()
            note = f"{self.name} has lengths only: Poisson arrivals, seed {seed}"
            poisson = dataclasses.replace(self._at(times), timed=True, notes=(*self.notes, note))
            return poisson.at_rate(rate)
        if len(self.arrivals) > 1 and math.isinf(self.rate):
            raise UsageError(f"--rate: all requests of {self.name} arrive at once, there is no rate to rescale")
        return self.sped_up(rate / self.rate) if len(self.arrivals) > 1 else self

    def sped_up(self, factor: float) -> Load:
        """Arrivals at `factor` times their own rate. Raises `UsageError` for a factor that is not positive."""
        if not (math.isfinite(factor) and factor > 0):
            raise UsageError(f"--speedup {factor:g}: must be a positive number")
        return self._at([a.time_s / factor for a in self.arrivals])

    def scaled(self, factor: float) -> Load:
        """Prompt and output lengths times `factor`, rounded, at least 1 token; shared prefixes stay shared.

        Raises `UsageError` unless 0 < factor <= 1.
        """
        if not 0 < factor <= 1:
            raise UsageError(f"--scale {factor:g}: must be above 0 and at most 1")
        exact = Fraction(factor).limit_denominator(10**6)

        def scale(arrival: Arrival) -> Arrival:
            old = arrival.prefix
            prefix = None if old is None else Prefix(old.ids, old.block * exact)
            prompt, output = (max(1, round(n * exact)) for n in (arrival.prompt_tokens, arrival.output_tokens))
            return dataclasses.replace(arrival, prompt_tokens=prompt, output_tokens=output, prefix=prefix)

        note = f"all prompt and output lengths scaled by {factor:g}"
        return dataclasses.replace(self, arrivals=tuple(map(scale, self.arrivals)), notes=(*self.notes, note))

    def clipped(self, max_len: int) -> Load:
        """Requests longer than `max_len` cut to fit: first the prompt, down to half of `max_len`, then the output."""

        def clip(arrival: Arrival) -> Arrival:
            if arrival.prompt_tokens + arrival.output_tokens <= max_len:
                return arrival
            prompt = min(arrival.prompt_tokens, max(max_len - arrival.output_tokens, max_len // 2))
            return dataclasses.replace(
                arrival, prompt_tokens=prompt, output_tokens=min(arrival.output_tokens, max_len - prompt)
            )

        count = self.longer_than(max_len)
        notes = (f"{count} of {len(self.arrivals)} requests clipped to {max_len} tokens",) if count else ()
        return dataclasses.replace(self, arrivals=tuple(map(clip, self.arrivals)), notes=self.notes + notes)

    def within(self, max_len: int) -> Load:
        """Only the requests of at most `max_len` tokens, prompt and output together; all of them if none is."""
        fit = tuple(a for a in self.arrivals if a.prompt_tokens + a.output_tokens <= max_len)
        return dataclasses.replace(self, arrivals=fit or self.arrivals)

    def longer_than(self, max_len: int) -> int:
        """How many requests need more than `max_len` tokens, prompt and output together."""
        return sum(a.prompt_tokens + a.output_tokens > max_len for a in self.arrivals)

    def _at(self, times: Sequence[float]) -> Load:
        moved = (dataclasses.replace(a, time_s=t) for a, t in zip(self.arrivals, times, strict=True))
        return dataclasses.replace(self, arrivals=tuple(moved))
