"""What a user may import, what it is, and what importing it costs."""

import subprocess
import sys

import pytest

import smpart

NAMES = {
    "wrap": "smpart.engine",
    "Engine": "smpart.engine",
    "RequestOutput": "smpart.engine",
    "SLO": "smpart.scheduler",
    "SamplingParams": "smpart.runtime",
    "KVConfig": "smpart.kvcache",
    "Split": "smpart.partition",
    "SmpartError": "smpart.errors",
    "UsageError": "smpart.errors",
    "UnsupportedModel": "smpart.errors",
    "BackendUnavailable": "smpart.errors",
    "EngineClosed": "smpart.errors",
    "RequestFailed": "smpart.errors",
}


def test_all_is_the_documented_list() -> None:
    assert set(smpart.__all__) == {*NAMES, "__version__"}


@pytest.mark.parametrize(("name", "room"), NAMES.items())
def test_name_lives_in_its_room(name: str, room: str) -> None:
    found = getattr(smpart, name)
    assert found.__name__ == name
    assert found.__module__ == room or found.__module__.startswith(f"{room}.")
    assert found.__doc__


def test_dir_lists_the_names_before_they_are_loaded() -> None:
    code = "import smpart; assert set(smpart.__all__) <= set(dir(smpart))"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'smpart' has no attribute 'Engin'"):
        _ = smpart.Engin  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "module", ["smpart", "smpart.partition", "smpart.predictor", "smpart.scheduler", "smpart.scheduler.policies"]
)
def test_import_is_light(module: str) -> None:
    code = f"import sys, {module}; print(*({{'torch', 'transformers'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
