"""What every worker process says to the engine, whatever it works on."""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from typing import Any

from smpart.errors import SmpartError


@dataclass(frozen=True, slots=True)
class Ready:
    """A worker's first word: it is ready (`error` is None), or cannot be and ends.

    Attributes:
        info: what its crew wants to know.
    """

    error: str | None = None
    info: Any = None


@dataclass(frozen=True, slots=True)
class Done:
    """The end of one work; times by `time.monotonic`. `error` says why there is no result."""

    id: int
    started: float
    finished: float
    result: Any
    error: str | None = None


def one_line(error: Exception) -> str:
    """An exception for a message: its type, and the first line of what it says."""
    return f"{type(error).__name__}: {error}".splitlines()[0] or type(error).__name__


def refusal(error: Exception) -> Ready:
    """Why a worker cannot start. What was not foreseen also goes to stderr, with where it happened."""
    if not isinstance(error, SmpartError):
        traceback.print_exception(error)
    return Ready(one_line(error))
