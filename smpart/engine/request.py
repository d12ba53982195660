"""One request, from the moment it is asked for until its last token is read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from smpart.runtime.batch import TokenLogprobs
from smpart.runtime.sampling import SamplingParams
from smpart.scheduler.slo import SLO


class FinishReason(StrEnum):
    """Why a request produces no more tokens."""

    STOP = "stop"
    """An end-of-sequence token, a stop id or a stop string."""
    LENGTH = "length"
    """`SamplingParams.max_tokens` reached."""
    CANCELLED = "cancelled"
    REFUSED = "refused"
    """Turned away by the policy, nothing computed."""
    ERROR = "error"
    """Could not be served; `Request.error` says why."""


class TextStream(Protocol):
    """Turns tokens into text as they come, and notices stop strings."""

    @property
    def stopped(self) -> str | None:
        """The stop string that ended the text, or None; later tokens are not text any more."""

    def push(self, token: int) -> str:
        """Text that `token` makes certain."""

    def finish(self) -> str:
        """Text held back so far."""


@dataclass(eq=False, slots=True)
class Request:
    """What was asked, and what came of it. Filled by the `EngineCore`.

    Attributes:
        prompt: token ids; any sequence of ints, a `range` too.
        hashes: prefix-cache keys of the prompt's complete blocks; None: computed from the tokens;
            empty: this request neither uses nor feeds the prefix cache.
        salt: requests share cached prefixes only with equal salts (tenants).
        text: turns tokens into text and watches for stop strings; None if nobody needs text.
        listener: called in the loop's thread after each token (with the new text) and once at the end.
        arrival: seconds on the core's clock; None: when it is added.
        times: when each output token was read, seconds on the core's clock.
        unwatched: nobody reads along and no token ends it, only their number does; known once it is added.
    """

    id: int
    prompt: Sequence[int]
    params: SamplingParams
    slo: SLO
    best_effort: bool = False
    hashes: Sequence[bytes] | None = None
    salt: str = ""
    text: TextStream | None = None
    listener: Callable[[Request, str], None] | None = None
    arrival: float | None = None
    times: list[float] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: str | None = None
    cached_tokens: int = 0
    preemptions: int = 0
    seed: int = 0
    unwatched: bool = False

    @property
    def finished(self) -> bool:
        """Whether no more tokens will come."""
        return self.finish_reason is not None

    def accept(self, token: int, when: float, logprobs: TokenLogprobs | None, eos: frozenset[int]) -> None:
        """Take one output token, decide whether it is the last, tell the listener."""
        self.times.append(when)
        self.token_ids.append(token)
        if logprobs is not None:
            self.logprobs.append(logprobs)
        ends = token in self.params.stop_token_ids or (token in eos and not self.params.ignore_eos)
        try:
            piece = self.text.push(token) if self.text is not None and not ends else ""
        except Exception as error:  # a tokenizer is the user's code: it may fail this request and no other
            self.text = None
            self.finish(FinishReason.ERROR, f"the tokenizer failed: {type(error).__name__}: {error}")
            return
        if ends or (self.text is not None and self.text.stopped is not None):
            self.finish(FinishReason.STOP, piece=piece)
        elif len(self.token_ids) >= self.params.max_tokens:
            self.finish(FinishReason.LENGTH, piece=piece)
        elif self.listener is not None:
            self.listener(self, piece)

    def finish(self, reason: FinishReason, error: str | None = None, piece: str = "") -> None:
        """End the request; later calls change nothing."""
        if self.finish_reason is not None:
            return
        self.finish_reason = reason
        self.error = error
        if self.text is not None:
            try:
                piece += self.text.finish()
            except Exception as failure:
                self.finish_reason = FinishReason.ERROR
                self.error = f"the tokenizer failed: {type(failure).__name__}: {failure}"
        if self.listener is not None:
            self.listener(self, piece)


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """When things happened, in seconds; NaN where they did not."""

    arrival: float
    tokens: tuple[float, ...]

    @property
    def ttft(self) -> float:
        """Arrival to first token, queueing included."""
        return self.tokens[0] - self.arrival if self.tokens else float("nan")

    @property
    def tpot(self) -> float:
        """(last token - first token) / (output tokens - 1)."""
        return (self.tokens[-1] - self.tokens[0]) / (len(self.tokens) - 1) if len(self.tokens) > 1 else float("nan")


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A finished request as its user sees it.

    Attributes:
        token_ids: output tokens, an ending stop token included.
        text: their text without stop strings; empty if the engine has no tokenizer.
        finish_reason: ``stop``, ``length`` or ``cancelled``.
        logprobs: one entry a token if asked for.
        cached_tokens: prompt tokens whose KV was reused.
    """

    id: int
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    finish_reason: str
    times: RequestTimes
    logprobs: tuple[TokenLogprobs, ...] | None = None
    cached_tokens: int = 0
