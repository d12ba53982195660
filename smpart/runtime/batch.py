"""What a lane's body is given to run, and what it answers. Plain data: no torch, cheap to send to a worker."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from smpart.runtime.sampling import SamplingParams

Rows = NDArray[np.int32]

NO_ROWS: Rows = np.zeros(0, dtype=np.int32)
"""For forwards without decode rows, and answers without tokens."""


@dataclass(frozen=True, slots=True)
class Sampler:
    """How one request's tokens are chosen; sent to a lane once, before the lane first samples for its slot.

    Attributes:
        prompt_len: prompt tokens; output `k` is sampled from the logits at position ``prompt_len - 1 + k``.
        seed: with the output index, the key of the sampling noise.
    """

    params: SamplingParams
    prompt_len: int
    seed: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """A run of consecutive known tokens of one request whose KV this forward computes.

    Tokens ``start .. start + length`` are read from the board. With `sample`, the token after the last one is
    sampled and written to the board at ``start + length``.
    """

    slot: int
    start: int
    length: int
    sample: bool


@dataclass(frozen=True, slots=True)
class Batch:
    """One forward: decode rows and prefill chunks together.

    Attributes:
        decode_slots: int32[n], requests that each compute one token.
        decode_positions: int32[n], position of each one's input token. It is read from the board, its KV is
            written at that position, and the sampled token goes to the board at ``position + 1``.
        chunks: packed prefill chunks.
    """

    decode_slots: Rows
    decode_positions: Rows
    chunks: tuple[Chunk, ...] = ()


@dataclass(frozen=True, slots=True)
class Segment:
    """Payload of one work: (part of) one forward.

    Attributes:
        forward: number of the forward this belongs to.
        batch: given with the first segment of a forward; None resumes a paused one.
        layers: decoder layers to run before pausing again; None runs to the end.
        drop: paused forwards to abandon before this one runs.
        samplers: requests this lane has not met yet, by slot.
    """

    forward: int
    batch: Batch | None = None
    layers: int | None = None
    drop: tuple[int, ...] = ()
    samplers: dict[int, Sampler] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one output position.

    Attributes:
        token: the sampled token's own log-probability.
        top: the most likely tokens, ``(token id, log-probability)`` in falling order.
    """

    token: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a segment produced.

    Attributes:
        done: the forward is finished; False: paused at a layer.
        slots: int32[m], requests a token was sampled for (decode rows first, then sampling chunks, in batch order).
        tokens: int32[m], those tokens.
        logprobs: by slot, for requests that asked.
        failures: by slot, requests whose logits were unusable (NaN); their token is meaningless.
    """

    done: bool
    slots: Rows
    tokens: Rows
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    failures: dict[int, str] = field(default_factory=dict)
