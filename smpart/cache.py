"""The user's cache folder: what is costly to make and can be made again (models, kernel binaries, profiles)."""

from __future__ import annotations

import os
from pathlib import Path


def cache() -> Path:
    """``$SMPART_CACHE``, or ``~/.cache/smpart``; it may not exist yet. Raises `RuntimeError` without a home folder."""
    return Path(os.environ.get("SMPART_CACHE") or "~/.cache/smpart").expanduser()
