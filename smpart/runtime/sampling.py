"""How a request's tokens are chosen: the user's `SamplingParams`, checked early."""

from __future__ import annotations

from dataclasses import dataclass

from smpart.errors import UsageError, is_number


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Names and meanings follow vLLM.

    Attributes:
        max_tokens: most tokens to produce, >= 1.
        temperature: 0 is greedy, and so is anything below 1e-5, where logits would overflow.
        top_p: nucleus mass in (0, 1].
        top_k: keep the k most likely tokens; 0 or -1 keeps all.
        min_p: drop tokens less likely than ``min_p`` times the likeliest.
        seed: reproduces the text under any schedule; None draws one a request.
        stop: strings that end the answer (not included in the text), also across token boundaries.
        stop_token_ids: token ids that end the answer.
        ignore_eos: go on past the model's end-of-sequence token.
        presence_penalty, frequency_penalty: as OpenAI defines them, over generated tokens.
        repetition_penalty: as transformers defines it, over prompt and generated tokens.
        logprobs: number of most likely tokens to report at each position; None reports nothing.

    Raises:
        UsageError: a value out of range.

    >>> SamplingParams(max_tokens=8).temperature
    0.0
    """

    max_tokens: int = 16
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] | list[str] | str = ()
    stop_token_ids: tuple[int, ...] | list[int] = ()
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logprobs: int | None = None

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else _several("stop", self.stop)
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", _several("stop_token_ids", self.stop_token_ids))
        if is_number(self.temperature) and 0.0 < self.temperature < _COLDEST:
            object.__setattr__(self, "temperature", 0.0)
        for name, ok, rule in self._rules():
            if not ok:
                raise UsageError(f"{name}={getattr(self, name)!r}: {rule}")

    def _rules(self) -> list[tuple[str, bool, str]]:
        def within(value: float, low: float, high: float) -> bool:
            return is_number(value) and low <= value <= high

        def whole(value: object, low: int) -> bool:
            return isinstance(value, int) and not isinstance(value, bool) and value >= low

        return [
            ("max_tokens", whole(self.max_tokens, 1), "must be a whole number of at least 1"),
            ("temperature", within(self.temperature, 0.0, 100.0), "must be a number from 0 (greedy) to 100"),
            ("top_p", within(self.top_p, 0.0, 1.0) and self.top_p > 0, "must be above 0 and at most 1"),
            ("top_k", whole(self.top_k, -1), "must be a whole number: 0 or -1 for all tokens, or how many to keep"),
            ("min_p", within(self.min_p, 0.0, 1.0), "must be from 0 to 1"),
            ("seed", self.seed is None or whole(self.seed, 0), "must be None or a whole number of at least 0"),
            ("stop", all(isinstance(s, str) and s for s in self.stop), "must be non-empty strings"),
            ("stop_token_ids", all(whole(t, 0) for t in self.stop_token_ids), "must be token ids"),
            ("presence_penalty", within(self.presence_penalty, -2.0, 2.0), "must be from -2 to 2"),
            ("frequency_penalty", within(self.frequency_penalty, -2.0, 2.0), "must be from -2 to 2"),
            ("repetition_penalty", within(self.repetition_penalty, 0.01, 10.0), "must be from 0.01 to 10; 1 is off"),
            (
                "logprobs",
                self.logprobs is None or (whole(self.logprobs, 0) and self.logprobs <= 20),
                "must be None or 0 to 20",
            ),
        ]

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.temperature == 0.0


_COLDEST = 1e-5
"""Temperatures below are greedy, as in vLLM: dividing logits by them overflows."""


def _several(name: str, value: object) -> tuple[object, ...]:
    """A field as a tuple; None is taken for empty, since calls written for vLLM pass it."""
    if value is None:
        return ()
    if not isinstance(value, list | tuple | set | frozenset):
        raise UsageError(f"{name}={value!r}: must be a list")
    return tuple(value)
