"""Container limits from trees of fake files: both cgroup versions, nested groups, the host's path in a container."""

from pathlib import Path

import pytest
from octavo_engine.devices.cgroup import CgroupLimits, read_limits

GIB = 1 << 30


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def v2(group: str, **limits: str) -> dict[str, str]:
    folder = f"sys/fs/cgroup{group}"
    return {f"{folder}/{name.replace('_', '.', 1)}": f"{value}\n" for name, value in limits.items()}


CASES = {
    "no cgroups": ({}, CgroupLimits()),
    "v2 unlimited": (
        {"proc/self/cgroup": "0::/\n", **v2("", memory_max="max", cpu_max="max 100000")},
        CgroupLimits(),
    ),
    "v2 container": (
        {
            "proc/self/cgroup": "0::/\n",
            **v2("", memory_max=str(4 * GIB), memory_current=str(3 * GIB), cpu_max="250000 100000"),
            "sys/fs/cgroup/memory.stat": f"anon 5\ninactive_file {GIB // 2}\nactive_file {GIB // 2}\n",
        },
        CgroupLimits(memory_bytes=4 * GIB, memory_available_bytes=2 * GIB, cpus=2.5),
    ),
    "v2 the parent is tighter": (
        {
            "proc/self/cgroup": "0::/pod/box\n",
            **v2("/pod", memory_max=str(2 * GIB), memory_current=str(GIB), cpu_max="max 100000"),
            **v2("/pod/box", memory_max=str(8 * GIB), memory_current="0", cpu_max="100000 100000"),
        },
        CgroupLimits(memory_bytes=2 * GIB, memory_available_bytes=GIB, cpus=1.0),
    ),
    "v2 the host's path is not here": (
        {"proc/self/cgroup": "0::/../../kubepods/x\n", **v2("", memory_max=str(GIB), memory_current=str(2 * GIB))},
        CgroupLimits(memory_bytes=GIB, memory_available_bytes=0),
    ),
    "v1": (
        {
            "proc/self/cgroup": "5:memory:/box\n4:cpu,cpuacct:/box\n1:name=systemd:/x\n",
            "sys/fs/cgroup/memory/box/memory.limit_in_bytes": f"{3 * GIB}\n",
            "sys/fs/cgroup/memory/box/memory.usage_in_bytes": f"{2 * GIB}\n",
            "sys/fs/cgroup/memory/box/memory.stat": f"active_file 7\ntotal_inactive_file {GIB // 4}\n"
            f"total_active_file {3 * GIB // 4}\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            "sys/fs/cgroup/cpu,cpuacct/box/cpu.cfs_quota_us": "150000\n",
            "sys/fs/cgroup/cpu,cpuacct/box/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
        },
        CgroupLimits(memory_bytes=3 * GIB, memory_available_bytes=2 * GIB, cpus=1.5),
    ),
    "v1 mounted by single names": (
        {
            "proc/self/cgroup": "4:cpu,cpuacct:/\n",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "50000\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
        },
        CgroupLimits(cpus=0.5),
    ),
    "hybrid": (
        {
            "proc/self/cgroup": "3:memory:/a\n0::/a\n",
            "sys/fs/cgroup/memory/a/memory.limit_in_bytes": f"{GIB}\n",
            "sys/fs/cgroup/memory/a/memory.usage_in_bytes": "0\n",
            "sys/fs/cgroup/unified/a/cpu.max": "300000 100000\n",
        },
        CgroupLimits(memory_bytes=GIB, memory_available_bytes=GIB, cpus=3.0),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_limits_are_read_from_every_layout(case: str, tmp_path: Path) -> None:
    files, want = CASES[case]
    assert read_limits(tree(tmp_path, files)) == want


def test_this_machines_limits_can_be_read() -> None:
    limits = read_limits()
    assert limits.cpus is None or limits.cpus > 0
