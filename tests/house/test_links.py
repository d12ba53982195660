"""The root shows the parts: directory links, committed as links."""

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

LINKS = {
    "partition": "smpart/partition",
    "profiler": "smpart/profiler",
    "predictor": "smpart/predictor",
    "scheduler": "smpart/scheduler",
    "smpart/csrc": "../csrc",
}


@pytest.mark.parametrize(("link", "target"), LINKS.items())
def test_link_leads_to_its_room(link: str, target: str) -> None:
    assert (ROOT / link).readlink() == Path(target)
    assert (ROOT / link).is_dir()


def test_links_are_committed_as_links_and_are_the_only_ones() -> None:
    listing = subprocess.run(
        ["git", "ls-files", "--stage"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    committed = {line.split("\t")[1] for line in listing if line.startswith("120000")}
    assert committed == set(LINKS)
