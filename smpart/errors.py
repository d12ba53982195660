"""Errors a user can meet. Each message is one line: what happened, what to do, what is safe."""

from __future__ import annotations

import math
from typing import TypeGuard


class SmpartError(Exception):
    """Base of every error smpart raises on purpose."""


class UsageError(SmpartError, ValueError):
    """Bad input: an argument, a file or a request that cannot be served as asked (exit code 2)."""


class UnsupportedModel(UsageError):
    """A model smpart cannot serve correctly; the message says why."""


class BackendUnavailable(SmpartError):
    """A backend or optional package that cannot be used here; the message says what would make it usable."""


class EngineClosed(SmpartError):
    """The engine was closed, or failed, before the request could finish."""


class RequestFailed(SmpartError):
    """One request could not be served; the others go on."""


def is_number(value: object) -> TypeGuard[float]:
    """Whether an argument is a finite number that a float can hold (True and False are none)."""
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:
        return False
