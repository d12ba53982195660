"""A context in which whatever makes the host wait for a device raises: on the CPU too, where nothing else shows it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from smpart.runtime.host_reads import host_reads


class HostWaitError(AssertionError):
    """Something would have made the host wait for a device."""


@contextmanager
def no_host_reads() -> Iterator[None]:
    """Raise `HostWaitError` at whatever would wait for a device in this thread."""

    def refuse(what: str) -> None:
        raise HostWaitError(what)

    with host_reads(refuse):
        yield
