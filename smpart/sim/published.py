"""Measurements that others published, read from a folder of files."""

from __future__ import annotations

import csv
import os
from pathlib import Path

from smpart.errors import UsageError

DATA_VARIABLE = "SMPART_DATA"
"""Environment variable that names the folder of published data."""

_BESIDE_THE_REPOSITORY = Path(__file__).parents[3] / "shared" / "data"


def data_folder() -> Path:
    """The folder of published data: ``SMPART_DATA``, or ``shared/data`` beside the repository.

    Raises:
        UsageError: there is no such folder.
    """
    folder = Path(os.environ.get(DATA_VARIABLE) or _BESIDE_THE_REPOSITORY)
    if not folder.is_dir():
        raise UsageError(f"no published data in {folder}: set {DATA_VARIABLE} to the folder that holds it")
    return folder


def data_file(relative: str) -> Path:
    """A file of that folder. Raises `UsageError` where it is absent."""
    path = data_folder() / relative
    if not path.is_file():
        raise UsageError(f"no {relative} in {data_folder()}: set {DATA_VARIABLE} to the folder that holds it")
    return path


def rows(relative: str) -> list[dict[str, str]]:
    """Rows of a CSV file of that folder. Raises `UsageError` where it is absent."""
    with data_file(relative).open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))
