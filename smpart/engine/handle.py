"""A request in the user's hands: tokens as they come, the whole output, or a cancel."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from typing import TYPE_CHECKING, TypeVar

from smpart.engine.request import FinishReason, Request, RequestOutput, RequestTimes
from smpart.errors import RequestFailed

if TYPE_CHECKING:
    from smpart.engine.engine import Engine

T = TypeVar("T")


class Handle:
    """One submitted request. Iterate it for tokens (``for``, or ``async for``), or wait for `result`.

    Every consumer sees every token; iterating ends at once if the request is cancelled or fails.
    """

    def __init__(self, engine: Engine, request: Request) -> None:
        self._engine = engine
        self._request = request
        self._changed = threading.Condition()
        self._tokens: list[int] = []
        self._pieces: list[str] = []
        self._ended = False
        self._wakers: deque[Callable[[], None]] = deque()

    @property
    def id(self) -> int:
        """The request's number in its engine."""
        return self._request.id

    @property
    def done(self) -> bool:
        """Whether no more tokens will come."""
        return self._ended

    def cancel(self) -> None:
        """End the request now; tokens already produced stay. Does nothing if it has ended."""
        self._engine.cancel(self._request)

    def result(self, timeout: float | None = None) -> RequestOutput:
        """Wait for the end.

        Raises:
            RequestFailed: it could not be served; the message says why.
            TimeoutError: not ended within `timeout` seconds (it goes on).
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._ended, timeout):
                raise TimeoutError(f"request {self.id} has not ended within {timeout} s; it goes on")
        return self._output()

    async def aresult(self) -> RequestOutput:
        """Like `result`, for asyncio."""
        async for _ in self:
            pass
        return self._output()

    def __iter__(self) -> Iterator[int]:
        return self._iterate(self._tokens)

    def __aiter__(self) -> AsyncIterator[int]:
        return self._aiterate(self._tokens)

    def text(self) -> Iterator[str]:
        """The answer's text in pieces, as far as it is certain."""
        return self._iterate(self._pieces)

    def atext(self) -> AsyncIterator[str]:
        """Like `text`, for asyncio."""
        return self._aiterate(self._pieces)

    def listen(self, request: Request, piece: str) -> None:
        """Called by the engine's thread after each token and at the end."""
        with self._changed:
            self._tokens.extend(request.token_ids[len(self._tokens) :])
            if piece:
                self._pieces.append(piece)
            self._ended = request.finished
            self._changed.notify_all()
            wakers, self._wakers = self._wakers, deque()
        for wake in wakers:
            wake()

    def _iterate(self, items: list[T]) -> Iterator[T]:
        seen = 0
        while True:
            with self._changed:
                while len(items) == seen and not self._ended:
                    self._changed.wait()
                fresh = items[seen:]
            if not fresh:
                self._raise_if_failed()
                return
            yield from fresh
            seen += len(fresh)

    async def _aiterate(self, items: list[T]) -> AsyncIterator[T]:
        loop, seen = asyncio.get_running_loop(), 0
        while True:
            changed = asyncio.Event()
            with self._changed:
                fresh, ended = items[seen:], self._ended
                if not fresh and not ended:
                    self._wakers.append(_waker(loop, changed))
            if fresh:
                for item in fresh:
                    yield item
                seen += len(fresh)
            elif ended:
                self._raise_if_failed()
                return
            else:
                await changed.wait()

    def _raise_if_failed(self) -> None:
        request = self._request
        if request.finish_reason in (FinishReason.ERROR, FinishReason.REFUSED):
            raise RequestFailed(f"request {request.id} was not served ({request.finish_reason}): {request.error}")

    def _output(self) -> RequestOutput:
        self._raise_if_failed()
        request = self._request
        assert request.finish_reason is not None and request.arrival is not None
        return RequestOutput(
            id=request.id,
            prompt_token_ids=tuple(request.prompt),
            token_ids=tuple(request.token_ids),
            text="".join(self._pieces),
            finish_reason=request.finish_reason.value,
            times=RequestTimes(request.arrival, tuple(request.times)),
            logprobs=tuple(request.logprobs) if request.params.logprobs is not None else None,
            cached_tokens=request.cached_tokens,
        )


def _waker(loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> Callable[[], None]:
    def wake() -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(event.set)

    return wake
