"""Programs whose results cannot be written: one line that names what could not be."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from smpart.bench.stdout import stdout
from smpart.durable import write_whole


def test_a_full_disk_is_blamed_on_the_file_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("smpart.durable.os.fsync", full)
    path = tmp_path / "results.json"
    with pytest.raises(SystemExit) as ended, stdout("toy"):
        write_whole(path, b"{}")
    assert ended.value.code == 1
    assert capsys.readouterr().err == f"toy: {path} cannot be written (No space left on device)\n"
    assert list(tmp_path.iterdir()) == []


def test_other_errors_of_files_are_not_swallowed(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), stdout("toy"):
        (tmp_path / "missing").read_text()
