"""What `examples/policy_shootout.py` says to options that ask for nothing, before anything is run."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "policy_shootout.py"


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (["--cells", "zzz"], "no such cell"),
        (["--policies", "smpart,nonsense"], "'nonsense': no such policy"),
        (["--policies", "smpart,static:abc"], "static:75/25"),
        (["--policies", "smpart,static:75/50"], "make 100"),
        (["--policies", "smpart:foo"], "'foo' is none of"),
    ],
)
def test_what_asks_for_nothing_is_refused_at_once(options: list[str], word: str, tmp_path, monkeypatch, capsys) -> None:
    out = tmp_path / "out.json"
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *options, "--out", str(out)])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert ended.value.code == 2
    assert word in capsys.readouterr().err
    assert not out.exists()
