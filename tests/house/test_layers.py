"""The rooms import downwards only, and the linters see every room exactly once."""

import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent


def test_layers_hold() -> None:
    done = subprocess.run([BIN / "lint-imports", "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_ruff_sees_each_module_once() -> None:
    listed = subprocess.run(
        [BIN / "ruff", "check", "--show-files", "."], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split("\n")
    seen = Counter(str(Path(line).resolve().relative_to(ROOT)) for line in listed if line.endswith(".py"))
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "smpart").rglob("*.py")}
    assert modules <= set(seen)
    assert set(seen.values()) == {1}
