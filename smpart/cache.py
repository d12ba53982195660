"""The user's cache folder: what is costly to make and can be made again (models, kernel binaries, profiles)."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def cache() -> Path:
    """``$SMPART_CACHE``, or ``~/.cache/smpart``; it may not exist yet. Raises `RuntimeError` without a home folder."""
    return Path(os.environ.get("SMPART_CACHE") or "~/.cache/smpart").expanduser()


def write_whole(path: Path, content: bytes) -> Path:
    """Write a file in one step: another process sees all of it or nothing, and may write the same at the same time.

    It is on the disk when this returns. Makes the folder; raises `OSError`, then what was there before stays.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}-", delete=False) as partial:
        building = Path(partial.name)
        try:
            partial.write(content)
            partial.flush()
            building.chmod(0o644)
            os.fsync(partial.fileno())
            partial.close()
            return building.replace(path)
        except BaseException:
            building.unlink(missing_ok=True)
            raise
