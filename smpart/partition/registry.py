"""Finds backends by name. A backend is one file of this room that registers; it is loaded when it is asked for.

A backend's file imports optional packages inside its functions, so that loading it never fails.
"""

from __future__ import annotations

import importlib
import logging
import pkgutil
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from smpart.errors import BackendUnavailable, UsageError
from smpart.partition.backend import Backend

logger = logging.getLogger(__name__)

Opener = Callable[[str], Backend]
"""Makes a backend from what follows the colon in ``name:argument`` (empty without one)."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A registered backend.

    Attributes:
        kind: the kind of `Device` it splits.
        rank: `auto` takes the usable backend with the highest; None: only when asked for by name.
        arguments: what may follow the colon, ``P/D`` standing for a split, ``N`` and ``F`` for a whole number and for
            a fraction, brackets for what may be left out; empty: nothing may.
    """

    name: str
    kind: str
    rank: int | None
    arguments: tuple[str, ...]
    open: Opener


_ENTRIES: dict[str, Entry] = {}


def register(name: str, *, kind: str, rank: int | None, arguments: tuple[str, ...] = ()) -> Callable[[Opener], Opener]:
    """Decorator for a backend's opener. The file must be called as the backend is."""

    def record(opener: Opener) -> Opener:
        _ENTRIES[name] = Entry(name, kind, rank, arguments, opener)
        return opener

    return record


def backends(kind: str | None = None) -> tuple[str, ...]:
    """Names of all backends that are built in, or of those for one kind of device.

    >>> "cores" in backends("cpu"), "sim" in backends()
    (True, True)
    """
    return tuple(entry.name for entry in _entries() if kind in (None, entry.kind))


def open_backend(spec: str, why_not: Callable[[Backend], str | None] = lambda backend: None) -> Backend:
    """Open ``cores``, ``sim:h100`` and so on; ``auto`` takes the best that works here and logs why.

    Args:
        why_not: what more speaks against a backend, for ``auto``; None: nothing.

    Raises:
        UsageError: no such backend, or an argument it does not take; the message lists what there is.
        BackendUnavailable: ``auto`` and nothing works.
    """
    if not isinstance(spec, str):
        raise UsageError(f"backend={spec!r}: must be a name such as auto or cores")
    if spec == "auto":
        return _choose(why_not)
    name, colon, argument = spec.partition(":")
    entry = _find(name)
    if entry is None:
        known = ", ".join(spelling for each in _entries() for spelling in _spellings(each))
        raise UsageError(f"backend {spec!r} is unknown; there are auto, {known}")
    if not _takes(entry, argument) and (colon or entry.arguments):
        known = ", ".join(_spellings(entry)) or name
        raise UsageError(f"backend {spec!r}: write {known}")
    return entry.open(argument)


def _choose(why_not: Callable[[Backend], str | None]) -> Backend:
    reasons: list[str] = []
    for entry in sorted(_entries(), key=lambda e: -(e.rank or 0)):
        if entry.rank is None:
            continue
        backend = entry.open("")
        why = backend.why_unusable() or why_not(backend)
        if why is None:
            logger.info("backend auto: %s", "; ".join([*reasons, f"{backend.name} is the best that works here"]))
            return backend
        reasons.append(f"{backend.name}: {why}")
    raise BackendUnavailable(f"no backend works here ({'; '.join(reasons)}); sim:<gpu> works everywhere")


def _takes(entry: Entry, argument: str) -> bool:
    return any(re.fullmatch(_form(each), argument) for each in entry.arguments)


_PLACES = {r"P/D": r"\d+/\d+", "N": r"\d+", "F": r"\d+(\.\d+)?", r"\[": "(", r"\]": ")?"}


def _form(spelling: str) -> str:
    """The regular expression of an argument."""
    form = re.escape(spelling)
    for place, meaning in _PLACES.items():
        form = form.replace(place, meaning)
    return form


def _find(name: str) -> Entry | None:
    if name not in _ENTRIES and name in _files():
        importlib.import_module(f"smpart.partition.{name}")
    return _ENTRIES.get(name)


def _entries() -> list[Entry]:
    return [entry for name in sorted({*_files(), *_ENTRIES}) if (entry := _find(name)) is not None]


def _spellings(entry: Entry) -> list[str]:
    return [f"{entry.name}:{each}" if each else entry.name for each in entry.arguments or ("",)]


def _files() -> frozenset[str]:
    return frozenset(module.name for module in pkgutil.iter_modules([str(Path(__file__).parent)]))
