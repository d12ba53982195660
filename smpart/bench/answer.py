"""`smpart generate`: one prompt, streamed, and how fast it came."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from smpart.bench.texts import chat_ids
from smpart.engine.deployment import Deployment
from smpart.engine.engine import Engine
from smpart.errors import UsageError
from smpart.runtime.sampling import SamplingParams
from smpart.scheduler.registry import make_policy
from smpart.scheduler.slo import SLO


@dataclass(frozen=True, slots=True)
class Question:
    """One prompt and where it is to be answered; the options of ``smpart generate`` of the same names."""

    model: str
    prompt: str
    params: SamplingParams
    chat: bool = False
    policy: str = "smpart"
    backend: str = "auto"
    dtype: str = "auto"
    profile: str = "auto"


def answer(question: Question, show: Callable[[str], None]) -> dict[str, object]:
    """Answer a prompt, giving each piece of text to `show` as it comes.

    Returns:
        text, token_ids, finish_reason, ttft_ms, tpot_ms (None with one token), model, backend and more, for JSON.

    Raises:
        UsageError: a model, backend, policy, profile or prompt that cannot be served as asked.
        RequestFailed: the engine could not finish it.
    """
    if not question.prompt:
        raise UsageError("empty prompt: give at least one character")
    make_policy(question.policy)
    if question.backend.startswith("sim"):
        raise UsageError(f"backend {question.backend!r} only simulates and gives no text; use cores, or smpart bench")
    deployment = Deployment.open(
        question.model, backend=question.backend, dtype=question.dtype, profile=question.profile
    )
    try:
        tokenizer = deployment.tokenizer
        if tokenizer is None:
            raise UsageError(f"model {question.model!r} has no tokenizer: it cannot read a text prompt")
        if question.chat and not tokenizer.chat_template:
            raise UsageError(f"model {question.model!r} has no chat template: use --raw")
        prompt = chat_ids(tokenizer, question.prompt) if question.chat else question.prompt
        engine = Engine(deployment, policy=question.policy, slo=SLO())
    except BaseException:
        deployment.close()
        raise
    with engine:
        handle = engine.submit(prompt, question.params)
        for piece in handle.text():
            show(piece)
        output = handle.result()
    times = output.times
    return {
        "text": output.text,
        "token_ids": list(output.token_ids),
        "finish_reason": output.finish_reason,
        "prompt_tokens": len(output.prompt_token_ids),
        "ttft_ms": times.ttft * 1e3,
        "tpot_ms": times.tpot * 1e3 if len(times.tokens) > 1 else None,
        "model": question.model,
        "backend": deployment.backend,
        "policy": question.policy,
        "seed": question.params.seed,
        "profile": deployment.profile_facts,
    }
