"""The wheel, installed outside the checkout, is all that a user needs."""

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(command: Sequence[str | Path], cwd: Path) -> str:
    """Standard output of a command that must succeed, in an environment that knows nothing of the checkout."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "COV"))}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy of the files that git knows, so that no build leftovers end up in it."""
    source, dist = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    listed = run(["git", "ls-files", "--cached", "--others", "--exclude-standard"], ROOT).splitlines()
    for name in listed:
        if os.path.lexists(ROOT / name):
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, source / name, follow_symlinks=False)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--no-deps", "--no-build-isolation"]
    run([*pip, "--no-index", "--wheel-dir", dist, source], source)
    (built,) = dist.glob("smpart-*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin` folder of a new environment that holds the wheel and borrows the libraries, not the checkout.

    A path in a ``.pth`` file is searched last and its own ``.pth`` files are not read, so the editable install
    beside the borrowed libraries stays out of sight.
    """
    home = tmp_path_factory.mktemp("elsewhere")
    venv.create(home, with_pip=False)
    python = home / "bin" / "python"
    site = Path(run([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], home).strip())
    (site / "borrowed.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    pip: list[str | Path] = [sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check", "install"]
    run([*pip, "--no-deps", "--no-index", wheel], home)
    return home / "bin"


def test_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"smpart"}
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "smpart").rglob("*.py")}
    assert modules == {name for name in names if name.endswith(".py")}
    assert "smpart/py.typed" in names
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


def test_wheel_holds_csrc(wheel: Path) -> None:
    sources = {path.relative_to(ROOT).as_posix() for path in (ROOT / "csrc").rglob("*") if path.is_file()}
    assert sources
    assert {f"smpart/{name}" for name in sources} <= set(zipfile.ZipFile(wheel).namelist())


def test_wheel_holds_the_template_of_pages(wheel: Path) -> None:
    assert "smpart/bench/pages/page.html.j2" in zipfile.ZipFile(wheel).namelist()


def test_installed_package_is_imported_from_outside_the_checkout(installed: Path, tmp_path: Path) -> None:
    names = "*(getattr(smpart, name) for name in smpart.__all__)"
    code = f"import smpart; print(smpart.__file__, smpart.Split.parse('3/1'), {names})"
    where = run([installed / "python", "-c", code], tmp_path).split()
    assert Path(where[0]).is_relative_to(installed.parent)
    assert where[1] == "3/1"


@pytest.mark.slow
def test_installed_command_runs(installed: Path, tmp_path: Path) -> None:
    assert "doctor" in run([installed / "smpart", "--help"], tmp_path)
    assert run([installed / "smpart", "doctor", "--json"], tmp_path).rstrip().endswith("}")
