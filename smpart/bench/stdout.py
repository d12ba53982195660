"""Results on stdout, and what becomes of a program whose stdout cannot be written."""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

_FULL = (errno.ENOSPC, errno.EIO, errno.EDQUOT)


@contextmanager
def stdout(name: str) -> Iterator[None]:
    """Around a whole program: where its results cannot be written it ends with exit code 1 and without a traceback.

    A full disk is told in a line on stderr, with the file if the error names one: else it is stdout that was written.
    A reader that has gone (``| head``) is no news to anybody: the program ends silently, as others do.

    Args:
        name: of the program.
    """
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except OSError as error:
        if error.errno in _FULL and error.filename is not None:
            print(f"{name}: {error.filename} cannot be written ({error.strerror})", file=sys.stderr)
            raise SystemExit(1) from None
        if error.errno not in (errno.EPIPE, *_FULL) or error.filename is not None:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is still buffered would fail again at exit
        if error.errno in _FULL:
            print(f"{name}: stdout cannot be written ({error.strerror})", file=sys.stderr)
        raise SystemExit(1) from None


def print_json(value: Mapping[str, object]) -> None:
    """One JSON object as a line of stdout. Raises `OSError` if it cannot be written; see `stdout`."""
    print(json.dumps(value), flush=True)
