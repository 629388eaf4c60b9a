"""The memory and CPU limits of this process's control group, versions 1 and 2.

Limits of all ancestors apply, so the result is the smallest limit up to the root. Inside a container the path in
`/proc/self/cgroup` may be the host's and not exist here: the root of the mount is then the container's own group.
`root` is "/" in production; tests pass a tree of files.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_UNLIMITED = 1 << 60  # version 1 writes "no limit" as a huge page-aligned number


@dataclass(frozen=True, slots=True, kw_only=True)
class CgroupLimits:
    """None: no limit. `memory_available_bytes`: memory left below the tightest limit, plus reclaimable cache."""

    memory_bytes: int | None = None
    memory_available_bytes: int | None = None
    cpus: float | None = None


def read_limits(root: Path = Path("/")) -> CgroupLimits:
    groups = _groups(root)
    limits: list[int] = []
    left: list[int] = []
    for folder in _ancestors(groups.get("memory")):
        limit = _read_int(folder / "memory.limit_in_bytes")
        if limit is not None and limit < _UNLIMITED:
            limits.append(limit)
            left.append(limit - _used(folder, "memory.usage_in_bytes", "total_"))
    for folder in _ancestors(groups.get("")):
        limit = _read_int(folder / "memory.max")
        if limit is not None:
            limits.append(limit)
            left.append(limit - _used(folder, "memory.current", ""))
    return CgroupLimits(
        memory_bytes=min(limits, default=None),
        memory_available_bytes=max(0, min(left)) if left else None,
        cpus=min((*_quotas_v1(groups.get("cpu")), *_quotas_v2(groups.get(""))), default=None),
    )


@dataclass(frozen=True, slots=True)
class _Group:
    mount: Path
    path: str


def _groups(root: Path) -> dict[str, _Group]:
    """Return groups by controller name; the unified hierarchy of version 2 has the empty name."""
    groups: dict[str, _Group] = {}
    for line in (_read(root / "proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        for name in controllers.split(","):
            candidates = [controllers, name] if controllers else ["unified", ""]
            mounts = [root / "sys/fs/cgroup" / c for c in candidates]
            mount = next((m for m in mounts if m.is_dir()), None)
            if mount is not None:
                groups[name] = _Group(mount, path)
    return groups


def _ancestors(group: _Group | None) -> Iterator[Path]:
    if group is None:
        return
    folder = group.mount / group.path.strip("/")
    if ".." in folder.parts or not folder.is_dir():
        folder = group.mount
    while True:
        yield folder
        if folder == group.mount:
            return
        folder = folder.parent


def _quotas_v1(group: _Group | None) -> Iterator[float]:
    for folder in _ancestors(group):
        quota, period = _read_int(folder / "cpu.cfs_quota_us"), _read_int(folder / "cpu.cfs_period_us")
        if quota is not None and period and quota > 0:
            yield quota / period


def _quotas_v2(group: _Group | None) -> Iterator[float]:
    for folder in _ancestors(group):
        quota, _, period = (_read(folder / "cpu.max") or "max").strip().partition(" ")
        if quota != "max":
            yield int(quota) / int(period)


def _used(folder: Path, usage: str, prefix: str) -> int:
    """Return the used bytes without the page cache, which the kernel reclaims before it kills a process."""
    used = _read_int(folder / usage) or 0
    cache = {f"{prefix}active_file", f"{prefix}inactive_file"}
    for line in (_read(folder / "memory.stat") or "").splitlines():
        key, _, value = line.partition(" ")
        if key in cache:
            used -= int(value)
    return max(0, used)


def _read_int(path: Path) -> int | None:
    text = (_read(path) or "").strip()
    return int(text) if text.lstrip("-").isdigit() else None


def _read(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:
        return None
