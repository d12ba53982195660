"""Cores and memory a process may use, on made-up machines."""

import os
from pathlib import Path

import psutil
import pytest

from smpart.partition.cgroups import cpu_quota, memory_available
from smpart.partition.cpu import Core, Cpus, parse_cpu_list

GIB = 2**30
V2_MOUNT = "31 23 0:28 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw"
V1_CPU = "32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct"
V1_MEMORY = "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory"


@pytest.fixture
def machine(tmp_path):
    """Writes files of a fake root: ``machine({"proc/meminfo": "..."})`` gives the root."""

    def write(files):
        files = {"proc/meminfo": "MemTotal: 67108864 kB\nMemAvailable: 33554432 kB\n"} | files
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text + "\n")
        return tmp_path

    return write


def topology(siblings, package=None):
    """Files of a machine whose CPU `i` shares a core with ``siblings[i]``."""
    base = "sys/devices/system/cpu/cpu{}/topology/{}"
    files = {base.format(cpu, "thread_siblings_list"): text for cpu, text in siblings.items()}
    return files | {base.format(cpu, "physical_package_id"): str(p) for cpu, p in (package or {}).items()}


def test_no_cgroup_at_all(machine):
    root = machine({})
    assert cpu_quota(root) is None
    assert memory_available(root) == 32 * GIB


def test_v2_limits_of_every_ancestor_bind(machine):
    root = machine(
        {
            "proc/self/cgroup": "0::/kube/pod/box",
            "proc/self/mountinfo": V2_MOUNT,
            "sys/fs/cgroup/kube/cpu.max": "150000 100000",
            "sys/fs/cgroup/kube/pod/cpu.max": "max 100000",
            "sys/fs/cgroup/kube/pod/box/cpu.max": "400000 100000",
            "sys/fs/cgroup/kube/memory.max": str(8 * GIB),
            "sys/fs/cgroup/kube/memory.current": str(7 * GIB),
            "sys/fs/cgroup/kube/memory.stat": f"anon 5\ninactive_file {2 * GIB}",
            "sys/fs/cgroup/kube/pod/box/memory.max": "max",
            "sys/fs/cgroup/kube/pod/box/memory.high": str(6 * GIB),
            "sys/fs/cgroup/kube/pod/box/memory.current": str(1 * GIB),
        }
    )
    assert cpu_quota(root) == 1.5
    assert memory_available(root) == 3 * GIB  # 8 - (7 - 2) at the ancestor, 6 - 1 in the box, 32 on the machine


def test_v1_limits(machine):
    root = machine(
        {
            "proc/self/cgroup": "9:name=systemd:/\n4:memory:/box\n1:cpu,cpuacct:/box\n0::/",
            "proc/self/mountinfo": "\n".join([V1_CPU, V1_MEMORY, V2_MOUNT.replace("/cgroup rw", "/cgroup/unified rw")]),
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000",
            "sys/fs/cgroup/cpu,cpuacct/box/cpu.cfs_quota_us": "250000",
            "sys/fs/cgroup/cpu,cpuacct/box/cpu.cfs_period_us": "100000",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": str(20 * GIB),
            "sys/fs/cgroup/memory/box/memory.limit_in_bytes": str(4 * GIB),
            "sys/fs/cgroup/memory/box/memory.usage_in_bytes": str(3 * GIB),
            "sys/fs/cgroup/memory/box/memory.stat": f"inactive_file 0\ntotal_inactive_file {GIB // 2}",
        }
    )
    assert cpu_quota(root) == 2.5
    assert memory_available(root) == GIB + GIB // 2


def test_a_container_sees_its_own_group_at_the_mount_point(machine):
    """The path in `/proc/self/cgroup` is the host's; the mount shows only that part of the tree."""
    root = machine(
        {
            "proc/self/cgroup": "4:memory:/docker/abc/inner\n1:cpu:/docker/abc",
            "proc/self/mountinfo": "\n".join(
                [
                    "32 31 0:29 /docker/abc /sys/fs/cgroup/cpu ro - cgroup cgroup rw,cpu",
                    "35 31 0:32 /docker/abc /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory",
                ]
            ),
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "50000",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": str(2 * GIB),
            "sys/fs/cgroup/memory/memory.usage_in_bytes": "0",
            "sys/fs/cgroup/memory/inner/memory.limit_in_bytes": str(GIB),
            "sys/fs/cgroup/memory/inner/memory.usage_in_bytes": "0",
        }
    )
    assert cpu_quota(root) == 0.5
    assert memory_available(root) == GIB


@pytest.mark.parametrize("group", ["/../../other", "/not/visible/here"])
def test_a_group_outside_the_mount_falls_back_to_the_mount_point(machine, group):
    root = machine(
        {
            "proc/self/cgroup": f"0::{group}",
            "proc/self/mountinfo": V2_MOUNT.replace(" / ", " /visible "),
            "sys/fs/cgroup/cpu.max": "300000 100000",
        }
    )
    assert cpu_quota(root) == 3.0


def test_memory_over_the_limit_leaves_nothing(machine):
    root = machine(
        {
            "proc/self/cgroup": "0::/",
            "proc/self/mountinfo": V2_MOUNT,
            "sys/fs/cgroup/memory.max": str(GIB),
            "sys/fs/cgroup/memory.current": str(2 * GIB),
        }
    )
    assert memory_available(root) == 0


def test_units_are_physical_cores(machine):
    siblings = {cpu: f"{cpu % 4},{cpu % 4 + 4}" for cpu in range(8)}
    cpus = Cpus.usable(machine(topology(siblings)), affinity=range(8))
    assert cpus.cores == tuple(Core(i, (i, i + 4)) for i in range(4))


def test_a_core_has_only_the_threads_the_mask_allows(machine):
    siblings = {cpu: f"{cpu // 2 * 2}-{cpu // 2 * 2 + 1}" for cpu in range(8)}
    cpus = Cpus.usable(machine(topology(siblings)), affinity=[1, 2, 3, 6])
    assert cpus.cores == (Core(1, (1,)), Core(2, (2, 3)), Core(6, (6,)))


def test_cores_of_a_socket_are_neighbours(machine):
    files = topology({cpu: str(cpu) for cpu in range(4)}, package={0: 0, 1: 1, 2: 0, 3: 1})
    assert [core.id for core in Cpus.usable(machine(files), affinity=range(4)).cores] == [0, 2, 1, 3]


@pytest.mark.parametrize(("quota", "cores"), [("50000", 1), ("199999", 1), ("200000", 2), ("1600000", 4)])
def test_the_quota_limits_the_cores(machine, quota, cores):
    root = machine(
        topology({cpu: str(cpu) for cpu in range(4)})
        | {
            "proc/self/cgroup": "0::/",
            "proc/self/mountinfo": V2_MOUNT,
            "sys/fs/cgroup/cpu.max": f"{quota} 100000",
        }
    )
    assert len(Cpus.usable(root, affinity=range(4)).cores) == cores


def test_without_a_topology_each_cpu_is_a_core(machine):
    assert Cpus.usable(machine({}), affinity=[3, 5]).cores == (Core(3, (3,)), Core(5, (5,)))


def test_the_processor_is_named(machine):
    root = machine({"proc/cpuinfo": "processor : 0\nmodel name\t: Fast 9000"})
    assert Cpus.usable(root, affinity=[0]).name == "Fast 9000"


def test_cpu_lists():
    assert parse_cpu_list("") == frozenset()
    assert parse_cpu_list("0-1,4,6-7\n") == {0, 1, 4, 6, 7}


def test_this_machine():
    cpus = Cpus.usable()
    assert {cpu for core in cpus.cores for cpu in core.cpus} <= os.sched_getaffinity(0)
    assert len(cpus.cores) <= (psutil.cpu_count(logical=False) or len(cpus.allowed))
    assert 0 < memory_available() <= psutil.virtual_memory().total
    assert not Path("/proc/self/cgroup").exists() or cpu_quota() is None or cpu_quota() > 0
