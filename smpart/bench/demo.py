"""`smpart demo`: real prompts of very different lengths arrive in bursts, under three policies on one machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from smpart.bench.bench import Watcher
from smpart.bench.budget import fair_budget
from smpart.bench.load import Arrival, Load
from smpart.bench.probe import Speed, measure
from smpart.bench.replay import Job
from smpart.bench.run import Run, run
from smpart.bench.texts import QUESTIONS, chat_ids, passage, record
from smpart.engine.deployment import Deployment
from smpart.errors import UsageError
from smpart.runtime.sampling import SamplingParams

_SECONDS = 30.0
"""Arrivals of one replay are spread over so many seconds; what is still queued then adds a little."""

_PREFILL_LOAD, _DECODE_LOAD = 0.5, 0.5
"""Shares of a lane's measured speed that prompts and answers ask for."""

_BURSTS = 6
_ANSWER = (24, 96)
"""Fewest and most tokens of an answer: too slow a machine gets fewer questions instead of shorter answers."""

_BATCH = 4.0
"""Sequences that decode at a time, about, while a burst is answered."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt of the demo."""

    time_s: float
    text: str
    ids: tuple[int, ...]


class Demo:
    """The demo's load and objectives, fitted to a deployment by a few measured steps.

    Args:
        deployment: of a real model with a tokenizer.
        seed: of the arrivals.
        say: told one line about each thing that is measured or chosen.
        watcher: displays a replay while it runs.

    Raises:
        UsageError: a model without a tokenizer or chat template.
    """

    def __init__(self, deployment: Deployment, seed: int, say: Callable[[str], None], watcher: Watcher) -> None:
        if deployment.virtual:
            raise UsageError(f"demo: {deployment.backend} only simulates and has no answers to show; use cores")
        if deployment.tokenizer is None or not deployment.tokenizer.chat_template:
            raise UsageError(f"demo: model {deployment.name!r} has no tokenizer with a chat template; smollm2 has")
        self._deployment, self._seed, self._watcher = deployment, seed, watcher
        with watcher("measuring the machine"):
            self.speed = measure(deployment)
        self.prompts = self._compose(self.speed)
        self.answer = round(min(max(self._output_tokens / len(self.prompts), _ANSWER[0]), _ANSWER[1]))
        arrivals = [Arrival(p.time_s, len(p.ids), self.answer, text=p.text) for p in self.prompts]
        self.load = Load("demo", tuple(arrivals))
        self.slo = self.speed.slo_for(self.load, _BATCH)
        say(
            f"measured on one lane ({self.speed.lanes}): prefill {self.speed.prefill_tok_s:.0f} tok/s, decode step "
            f"{1e3 * self.speed.step(1):.0f} ms at batch 1, {1e3 * self.speed.step(8):.0f} ms at batch 8"
        )
        lengths = sorted(len(p.ids) for p in self.prompts)
        say(
            f"load: {len(lengths)} prompts of {lengths[0]} to {lengths[-1]} tokens in {_BURSTS} bursts over "
            f"{self.load.arrivals[-1].time_s:.0f} s, answers of at most {self.answer} tokens, seed {seed}"
        )
        prompt_tok_s = sum(lengths) / _SECONDS
        budget = fair_budget(deployment, self.speed, self.slo, _BATCH, prompt_tok_s)
        self.policies = ("mixed", f"chunked:{budget}", "smpart")
        say(
            f"SLO fitted to this machine: TTFT {self.slo.ttft_ms:g} ms (twice a long prompt alone), TPOT "
            f"{self.slo.tpot_ms:g} ms (twice a one-lane step at batch {_BATCH:g}), ITL {self.slo.itl_ms:g} ms"
        )
        say(f"chunked takes {budget} tokens a step: what fits the TPOT objective, or more if it could not keep up")

    def runs(self) -> Iterator[Run]:
        """The same load under each policy, one after another."""
        params = SamplingParams(max_tokens=self.answer)
        jobs = [Job(p.time_s, p.ids, params) for p in self.prompts]
        for policy in self.policies:
            with self._watcher(policy) as watch:
                yield run(self._deployment, policy, self.slo, self.load, jobs, seed=self._seed, watch=watch)

    def answers(self, result: Run, count: int = 2) -> list[tuple[str, str]]:
        """The shortest prompts and what the model answered them."""
        assert self._deployment.tokenizer is not None
        shortest = sorted(result.replay.served, key=lambda s: s.prompt_tokens)[:count]
        decode = self._deployment.tokenizer.decode
        return [
            (self.prompts[s.index].text, str(decode(list(s.token_ids), skip_special_tokens=True))) for s in shortest
        ]

    def _compose(self, speed: Speed) -> tuple[Prompt, ...]:
        """Bursts of questions and passages; a long record comes with every other burst, as its first prompt."""
        tokenizer, documents = self._deployment.tokenizer, _BURSTS // 2
        assert tokenizer is not None
        budget = _PREFILL_LOAD * speed.prefill_tok_s * _SECONDS
        most = int(0.6 * self._deployment.max_len)
        words_a_token = len(record(200, 0).split()) / len(tokenizer.encode(record(200, 0)))
        document = words_a_token * min(most, 0.65 * budget / documents)
        passages = max(_BURSTS, min(3 * _BURSTS, round(0.2 * budget / 180)))
        rng = np.random.default_rng(self._seed)
        bursts: list[list[str]] = [[record(round(document), i // 2)] if i % 2 else [] for i in range(_BURSTS)]
        for number in range(passages):
            bursts[number % _BURSTS].append(passage(number))
        room = round(self._output_tokens / _ANSWER[0]) - documents - passages
        for number, question in enumerate(QUESTIONS[: max(_BURSTS, room)]):
            bursts[(number + 3) % _BURSTS].append(question)
        prompts = []
        for number, texts in enumerate(bursts):
            start = number * _SECONDS / _BURSTS
            gaps = rng.exponential(_SECONDS / _BURSTS / 3 / len(texts), len(texts))
            times = start + np.cumsum(gaps) - gaps[0]
            prompts += [Prompt(float(t), x, tuple(chat_ids(tokenizer, x))) for t, x in zip(times, texts, strict=True)]
        return tuple(sorted(prompts, key=lambda p: p.time_s))

    @property
    def _output_tokens(self) -> float:
        """Tokens of all answers together."""
        return _DECODE_LOAD * _SECONDS * _BATCH / self.speed.step(_BATCH)


def verdict(runs: Sequence[Run]) -> str:
    """What the numbers say, in two sentences, for smpart or against it."""
    by_policy: dict[str, Any] = {r.policy: r.record for r in runs}
    ours = by_policy["smpart"]
    rival = max((n for n in by_policy if n != "smpart"), key=lambda n: float(by_policy[n]["goodput_rps"]))
    theirs = by_policy[rival]
    goodput, best = ours["goodput_rps"], theirs["goodput_rps"]
    if best <= 0:
        said = f"smpart met every objective for {ours['slo_attainment']:.0%} of the requests, the others for none."
    else:
        ratio = goodput / best
        word = "more than" if ratio > 1.02 else "less than" if ratio < 0.98 else "the same as"
        said = f"smpart's goodput is {ratio:.2f}x that of {rival}, {word} the best of the others."
    gaps = ", ".join(f"{name} {r['itl_ms']['max'] or 0:,.0f} ms" for name, r in by_policy.items())
    waits = ", ".join(f"{name} {r['ttft_ms']['p95'] or 0:,.0f} ms" for name, r in by_policy.items())
    return f"{said} Longest gap between two tokens: {gaps}; 95 % of the first tokens came within: {waits}."
