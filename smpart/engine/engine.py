"""The user's engine: a thread that runs the loop, and ways in for prompts of every kind."""

from __future__ import annotations

import atexit
import itertools
import logging
import threading
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, cast, overload

import numpy as np

from smpart.engine.core import EngineCore
from smpart.engine.deployment import Deployment
from smpart.engine.handle import Handle
from smpart.engine.profiles import Profile
from smpart.engine.request import FinishReason, Request, RequestOutput
from smpart.engine.tensors import generate_tensor
from smpart.errors import EngineClosed, UsageError
from smpart.kvcache import KVConfig
from smpart.runtime.detokenizer import StreamDetokenizer
from smpart.runtime.sampling import SamplingParams
from smpart.scheduler.slo import SLO

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Prompt = str | Sequence[int]

_log = logging.getLogger(__name__)


def wrap(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    slo: SLO | None = None,
    backend: str = "auto",
    policy: str = "smpart",
    kv: KVConfig | None = None,
    profile: Profile = "auto",
) -> Engine:
    """Serve an unmodified transformers model on two lanes.

    The model's weights move into memory that lane workers share (their values and the model's own use stay as
    they are). Use the engine in a ``with`` statement, or `close` it.

    Args:
        tokenizer: needed for text prompts, text outputs and stop strings only.
        slo: objectives of requests that bring none of their own.
        backend: ``auto``, ``cores``, ...; see ``smpart doctor``.
        policy: how work is placed on the lanes; see ``smpart bench --help``.
        kv: size and limits of the KV memory.
        profile: what ``smpart profile`` measured: ``auto`` takes the one that is installed for this machine and model,
            if there is one; ``none`` goes without; or its folder, its file, or an `Artefact`.

    Raises:
        UnsupportedModel: the model cannot be served correctly; the message says why.
        BackendUnavailable: the backend cannot be used here.
        UsageError: an unknown policy or backend, limits that cannot hold, or a profile of another machine or model.
    """
    _check_slo(slo)
    if tokenizer is not None and not (hasattr(tokenizer, "encode") and hasattr(tokenizer, "decode")):
        raise UsageError(f"tokenizer: a {type(tokenizer).__name__} has no encode and decode")
    deployment = Deployment.serve(model, tokenizer, backend=backend, kv=kv, profile=profile)
    try:
        return Engine(deployment, policy=policy, slo=slo or SLO())
    except BaseException:
        deployment.close()
        raise


class Engine:
    """Serves requests from any thread or event loop. Owns its `Deployment` and closes it."""

    def __init__(self, deployment: Deployment, *, policy: str, slo: SLO) -> None:
        self._deployment = deployment
        self._slo = slo
        self._core: EngineCore = deployment.core(policy, slo)
        self._numbers = itertools.count()
        self._inbox: deque[tuple[str, Request]] = deque()
        self._closing = False
        self._failure: str | None = None
        self._thread = threading.Thread(target=self._loop, name="smpart-engine", daemon=True)
        self._thread.start()
        # A script may end without `close`. What was imported to make the deployment closes after this.
        atexit.register(self.close)

    # ---- requests

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        slo: SLO | None = None,
        best_effort: bool = False,
        salt: str = "",
    ) -> Handle:
        """Queue one prompt (text or token ids) and return at once.

        Args:
            slo: this request's own objectives.
            best_effort: yields to every request that is not.
            salt: cached prefixes are shared between requests of equal salt only.

        Raises:
            UsageError: a prompt or parameters that can never be served; nothing is queued.
            EngineClosed: the engine was closed or has failed.
        """
        params = params if params is not None else SamplingParams()
        _check_options(params, slo, salt)
        ids = self._token_ids(prompt)
        request = Request(next(self._numbers), ids, params, slo or self._slo, best_effort, salt=salt)
        tokenizer = self._deployment.tokenizer
        if tokenizer is not None:
            request.text = StreamDetokenizer(tokenizer, tuple(params.stop))
        elif params.stop:
            raise UsageError("stop strings need a tokenizer: pass one to smpart.wrap, or use stop_token_ids")
        self._core.check(request)
        handle = Handle(self, request)
        request.listener = handle.listen
        self._inbox.append(("add", request))
        if self._closing or self._failure is not None:  # asked after appending: the loop's last look may be over
            raise EngineClosed(self._failure or "the engine was closed")
        self._core.lanes.wake()
        return handle

    def cancel(self, request: Request) -> None:
        """End a request now (`Handle.cancel`)."""
        self._inbox.append(("cancel", request))
        self._core.lanes.wake()

    @overload
    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[RequestOutput]: ...

    @overload
    def generate(
        self, *, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None, **options: Any
    ) -> torch.Tensor: ...

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt] | None = None,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        **options: Any,
    ) -> list[RequestOutput] | torch.Tensor:
        """Answer prompts and wait: vLLM's shape (lists) or Hugging Face's (tensors).

        With `input_ids`, int64[batch, length] (left-padded where `attention_mask` is 0), the answer is
        int64[batch, length + new], right-padded, and `options` are those of transformers' ``generate``
        that make sense here (``max_new_tokens``, ``do_sample``, ``temperature``, ...).

        Raises:
            UsageError: bad input; nothing was queued.
            RequestFailed: one of the requests could not be served.
        """
        if input_ids is not None:
            if prompts is not None or params is not None:
                raise UsageError("generate: give prompts with SamplingParams, or input_ids with options, not both")
            return generate_tensor(self, self._deployment.generation_defaults, input_ids, attention_mask, options)
        if prompts is None or options:
            raise UsageError(f"generate: give prompts or input_ids; unknown options {sorted(options)}")
        batch = _as_batch(prompts)
        each = list(params) if isinstance(params, Sequence) else [params] * len(batch)
        if len(each) != len(batch):
            raise UsageError(f"generate: {len(batch)} prompts but {len(each)} SamplingParams")
        return [handle.result() for handle in self.submit_all(batch, each)]

    def submit_all(self, prompts: Sequence[Prompt], params: Sequence[SamplingParams | None]) -> list[Handle]:
        """Queue several prompts, all or none."""
        handles: list[Handle] = []
        try:
            for prompt, one in zip(prompts, params, strict=True):
                handles.append(self.submit(prompt, one))
        except BaseException:
            for handle in handles:
                handle.cancel()
            raise
        return handles

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[str]:
        """The answer's text, piece by piece. Leaving the loop early cancels the request."""
        self._need_tokenizer("stream")
        return self._stream(self.submit(prompt, params))

    async def asubmit(self, prompt: Prompt, params: SamplingParams | None = None, **options: Any) -> Handle:
        """`submit`, for asyncio."""
        return self.submit(prompt, params, **options)

    async def astream(self, prompt: Prompt, params: SamplingParams | None = None) -> AsyncIterator[str]:
        """`stream`, for asyncio: ``async for text in engine.astream(...)``."""
        self._need_tokenizer("astream")
        handle = self.submit(prompt, params)
        try:
            async for piece in handle.atext():
                yield piece
        finally:
            handle.cancel()

    # ---- the engine itself

    @property
    def deployment(self) -> Deployment:
        """The model, its lanes and KV memory."""
        return self._deployment

    @property
    def core(self) -> EngineCore:
        """The loop's state, for metrics (read only; it changes under your eyes)."""
        return self._core

    @property
    def drifted(self) -> str | None:
        """In words, why the profile is no longer true and should be measured anew; None: it is, or there is none."""
        return self._core.drifted or self._deployment.contradiction

    def close(self) -> None:
        """End every request, the workers and their memory. Idempotent."""
        atexit.unregister(self.close)
        if not self._closing:
            self._closing = True
            self._core.lanes.wake()
        if self._thread is not threading.current_thread():
            self._thread.join()
        self._deployment.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _loop(self) -> None:
        try:
            while not self._closing:
                self._read_inbox()
                self._core.turn(None)
        except Exception as error:
            self._failure = f"the engine stopped: {error}"
            _log.exception("the engine stopped")
        finally:
            self._failure = self._failure or "the engine was closed"
            self._read_inbox()
            self._core.fail_all(self._failure)

    def _read_inbox(self) -> None:
        while self._inbox:
            kind, request = self._inbox.popleft()
            if kind == "cancel":
                self._core.cancel(request)
                continue
            try:
                self._core.add(request)
            except Exception as error:  # whatever is wrong with one request must not cost the others anything
                request.finish(FinishReason.ERROR, f"{type(error).__name__}: {error}")

    def _stream(self, handle: Handle) -> Iterator[str]:
        try:
            yield from handle.text()
        finally:
            handle.cancel()

    def _need_tokenizer(self, what: str) -> None:
        if self._deployment.tokenizer is None:
            raise UsageError(f"{what} yields text and needs a tokenizer: pass one to smpart.wrap, or iterate a handle")

    def _token_ids(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            if self._deployment.tokenizer is None:
                raise UsageError("a text prompt needs a tokenizer: pass one to smpart.wrap, or give token ids")
            try:
                return [int(t) for t in self._deployment.tokenizer.encode(prompt)]
            except (TypeError, ValueError) as error:
                raise UsageError(f"the tokenizer cannot read this prompt ({error}): is it valid Unicode?") from error
        if not isinstance(prompt, Sequence | np.ndarray) or isinstance(prompt, bytes):
            raise UsageError(f"a prompt is text or a sequence of token ids, not {type(prompt).__name__}")
        vocab = self._deployment.model_shape.vocab
        ids = [t if isinstance(t, int) and not isinstance(t, bool) else _as_int(t) for t in prompt]
        bad = next((t for t in ids if not 0 <= t < vocab), None)
        if bad is not None:
            raise UsageError(f"token id {bad} is outside the model's vocabulary of {vocab}")
        return ids


def _as_batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several, as a list of prompts."""
    if not isinstance(prompts, Sequence | np.ndarray) or isinstance(prompts, bytes):
        raise UsageError(f"prompts must be text, token ids or a list of them, not {type(prompts).__name__}")
    if isinstance(prompts, str) or (len(prompts) > 0 and not isinstance(prompts[0], str | Sequence | np.ndarray)):
        if len(prompts) > 0 and hasattr(prompts[0], "dim"):
            raise UsageError("prompts of tensors: pass their .tolist(), or one padded tensor as input_ids")
        return [cast(Prompt, prompts)]
    return list(cast(Sequence[Prompt], prompts))


def _check_slo(slo: object) -> None:
    if slo is not None and not isinstance(slo, SLO):
        raise UsageError(f"slo must be an SLO, not {type(slo).__name__}")


def _check_options(params: object, slo: object, salt: object) -> None:
    """Raise `UsageError` for arguments of the wrong kind: they would only be noticed in the engine's thread."""
    if not isinstance(params, SamplingParams):
        raise UsageError(f"params must be SamplingParams, not {type(params).__name__}")
    _check_slo(slo)
    try:
        if not isinstance(salt, str):
            raise TypeError
        salt.encode()
    except (TypeError, UnicodeEncodeError):
        raise UsageError(f"salt={salt!r}: must be text that can be encoded as UTF-8") from None


def _as_int(token: Any) -> int:
    try:
        return int(token.__index__())
    except (AttributeError, TypeError):
        raise UsageError(f"token ids must be whole numbers, got {token!r}") from None
