"""Forwards that stop before any decoder layer and go on later, without a thread of their own.

A forward runs in a greenlet; a pre-hook on every decoder layer switches back to the caller once the granted layers
are used up. Several paused forwards of one model can interleave, and one can be dropped for good.

The caller enters inference mode around `advance`, not the forward: that mode belongs to the OS thread, and a
greenlet that paused inside it would leave it on.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from greenlet import greenlet
from torch import Tensor
from torch.nn import Module

_advancing: ContextVar[PausableForward | None] = ContextVar("advancing", default=None)


def pause_hook(module: Module, arguments: Any) -> None:
    """Forward pre-hook for decoder layers. Does nothing outside a pausable forward."""
    forward = _advancing.get()
    if forward is not None:
        forward.at_layer()


class PausableForward:
    """One forward, run in pieces by the thread that created it.

    Args:
        compute: runs the whole forward; its result is what the last `advance` returns.
    """

    def __init__(self, compute: Callable[[], Tensor]) -> None:
        self._compute = compute
        self._caller: greenlet | None = None
        self._left: int | None = 0
        self._greenlet = greenlet(self._run)

    def advance(self, layers: int | None) -> Tensor | None:
        """Run up to `layers` decoder layers (None: to the end). Returns the result, or None if it paused again.

        What the forward raises is raised here; it is then over.
        """
        self._left = layers
        self._caller = greenlet.getcurrent()
        result: Tensor | None = self._greenlet.switch()
        return result

    def abandon(self) -> None:
        """Unwind a paused forward. It cannot be resumed. Idempotent."""
        if self._greenlet:
            self._greenlet.throw()

    def at_layer(self) -> None:
        """Called before each decoder layer, inside the forward."""
        while self._left == 0:
            assert self._caller is not None
            self._caller.switch(None)
        if self._left is not None:
            self._left -= 1

    def _run(self) -> Tensor:
        # A greenlet has a context of its own: only code inside this forward sees the variable.
        _advancing.set(self)
        return self._compute()
