"""Where a number was measured."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from smpart.partition.cgroups import memory_available
from smpart.partition.cpu import Cpus

_PACKAGES = ("smpart", "torch", "transformers", "numpy")


def host() -> dict[str, object]:
    """CPU, cores and memory this process may use, versions, command line and git revision, ready for JSON."""
    cpus = Cpus.usable()
    return {
        "name": platform.node(),
        "system": f"{platform.system()} {platform.release()}",
        "cpu": cpus.name,
        "cores": len(cpus.cores),
        "cpu_quota": cpus.quota,
        "memory_gib": round(memory_available() / 2**30, 1),
        "load": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        **versions(_PACKAGES),
        "revision": revision(),
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
    }


def versions(packages: tuple[str, ...]) -> dict[str, str | None]:
    """Installed versions by package; None where one is missing."""
    found: dict[str, str | None] = {}
    for package in packages:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    return found


def revision() -> str | None:
    """Git revision of the source tree smpart runs from, ``+`` if it was changed; None outside one."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return None
    try:
        command = ["git", "-C", str(root), "describe", "--always", "--dirty=+", "--abbrev=12", "--exclude=*"]
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
