"""Files that are there whole or not at all, whenever the process or the machine dies."""

from __future__ import annotations

import fcntl
import os
import secrets
from contextlib import suppress
from pathlib import Path

from smpart.errors import UsageError


def make_folder(folder: Path) -> None:
    """Make a folder, and those above it, unless they are there; they outlast a power failure.

    Raises:
        OSError: it cannot be made, or something else is there.
    """
    if not folder.is_dir():
        make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        _sync_folder(folder.parent)


def write_whole(path: Path, data: bytes) -> Path:
    """Write a file so that readers find all of `data` or what was there before; it is on the disk on return.

    Several processes may write the same file at once: one of them wins. The folder must be there.

    Raises:
        OSError: it could not be written; it names the file. Nothing is left of it then, unless the disk refuses that
            too. A file that it was to replace stays, unless the last step failed, the flush of the folder.
    """
    temporary = _temporary(path, secrets.token_hex(4))
    try:
        _write(temporary, data)
        temporary.replace(path)
        temporary = path
        _sync_folder(path.parent)
    except BaseException as error:
        with suppress(OSError):
            temporary.unlink()
        if isinstance(error, OSError):
            error.filename = str(path)
        raise
    return path


def sweep_out(path: Path) -> None:
    """Remove what killed writes of a file left; its name may be a pattern. Only for the one who may write there."""
    for leftover in path.parent.glob(_temporary(path, "*").name):
        with suppress(OSError):  # it harms nobody
            leftover.unlink()


def lock(path: Path, folder: Path) -> int:
    """Lock a file for as long as this process lives, or until the descriptor that is returned is closed.

    The kernel holds the lock (``flock``), so that no death leaves one behind. The file itself stays.

    Raises:
        UsageError: another has locked it; the message speaks of `folder`, for which the lock stands.
        OSError: the file cannot be opened.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException as error:
        os.close(descriptor)
        if isinstance(error, BlockingIOError):
            busy = f"{folder}: another process is writing here; wait until it ends, or choose another place"
            raise UsageError(busy) from None
        raise
    return descriptor


def _temporary(path: Path, mark: str) -> Path:
    return path.with_name(f".{path.name}-{mark}.tmp")


def _write(path: Path, data: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
    try:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(descriptor, rest) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
