"""What control groups (v1 and v2) leave this process of a machine's CPU time and memory.

A limit set on any ancestor binds as well, so every level from the process's own group up to the mount point is
read. In a container `/proc/self/cgroup` may name a path that only the host can see; the mount's root field tells
which part of it is visible, and what is not visible is taken to be the mount point itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/")


def cpu_quota(root: Path = _ROOT) -> float | None:
    """CPUs' worth of time the tightest quota allows, or None without one.

    Args:
        root: where `proc` and `sys` are looked for.
    """
    quotas = [quota for level in _levels(root, "cpu") if (quota := _level_quota(level)) is not None]
    return min(quotas, default=None)


def memory_available(root: Path = _ROOT) -> int:
    """Bytes this process may still take: what the machine has available, or less where a group's limit is nearer.

    A group's page cache that nobody is using counts as free (its working set is usage less inactive file pages, as
    Kubernetes defines it), because the kernel drops it before it enforces the limit.
    """
    rooms = [room for level in _levels(root, "memory") if (room := _level_room(level)) is not None]
    return max(0, min([_machine_available(root), *rooms]))


def _levels(root: Path, controller: str) -> Iterator[Path]:
    """Directories of this process's groups that `controller` may be set in, innermost first."""
    paths = dict(_group_paths(root))
    for kind, controllers, visible, mount in _mounts(root):
        key = "" if kind == "cgroup2" else controller
        if key not in paths or (kind == "cgroup" and controller not in controllers):
            continue
        group = paths[key]
        inside = group == visible or group.startswith(visible.rstrip("/") + "/")
        top = root / mount.lstrip("/")
        here = top / group[len(visible.rstrip("/")) :].strip("/") if inside and ".." not in group else top
        yield here
        while here != top:
            here = here.parent
            yield here


def _group_paths(root: Path) -> Iterator[tuple[str, str]]:
    """``(controller, path)`` of `/proc/self/cgroup`; the controller is empty for v2."""
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            yield controller, path


def _mounts(root: Path) -> Iterator[tuple[str, frozenset[str], str, str]]:
    """``(file system, options, visible root, mount point)`` of every cgroup mount."""
    for line in _lines(root / "proc/self/mountinfo"):
        left, _, right = line.partition(" - ")
        fields, tail = left.split(), right.split()
        if len(tail) >= 3 and tail[0] in ("cgroup", "cgroup2"):
            yield tail[0], frozenset(tail[2].split(",")), fields[3], fields[4].replace("\\040", " ")


def _level_quota(level: Path) -> float | None:
    v2 = _text(level / "cpu.max").split()
    v1 = [_text(level / "cpu.cfs_quota_us"), _text(level / "cpu.cfs_period_us")]
    quota, period = v2 if len(v2) == 2 else v1
    if quota in ("", "max", "-1") or not period:
        return None
    return int(quota) / int(period)


def _level_room(level: Path) -> int | None:
    names = ("memory.max", "memory.high", "memory.limit_in_bytes")
    limits = [int(text) for name in names if (text := _text(level / name)) not in ("", "max")]
    used = _text(level / "memory.current") or _text(level / "memory.usage_in_bytes")
    if not limits or not used:
        return None
    stat = dict(line.split(None, 1) for line in _lines(level / "memory.stat"))
    idle_cache = stat.get("total_inactive_file") or stat.get("inactive_file") or "0"
    return min(limits) - max(0, int(used) - int(idle_cache))


def _machine_available(root: Path) -> int:
    for line in _lines(root / "proc/meminfo"):
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return int(rest.split()[0]) * 1024
    raise OSError(f"{root / 'proc/meminfo'} has no MemAvailable line: Linux 3.14 or later is needed")


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _lines(path: Path) -> list[str]:
    return _text(path).splitlines()
