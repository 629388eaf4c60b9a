"""The memory of a machine or its container, how messages show sizes, and how much freed memory a process keeps.

By default, glibc maps and unmaps outputs of megabytes in each step, so that each step writes to new pages: a prompt of
1024 tokens takes 29,000 page faults with SmolLM2, 3 % of its time. `keep_freed_memory` lets the process keep up to
`KEPT_BYTES` of freed memory.
"""

import ctypes
import os
from dataclasses import dataclass
from pathlib import Path

from octavo_engine.devices.cgroup import CgroupLimits

GIB = 1 << 30
MIB = 1 << 20
KV_SPACE_VARIABLES = ("OCTAVO_CPU_KVCACHE_SPACE", "VLLM_CPU_KVCACHE_SPACE")
#: Variable that `octavo up` sets for each engine: the number of engines that it runs.
NUM_ENGINES_VARIABLE = "OCTAVO_NUM_ENGINES"
#: Variable for the number of engines on this engine's GPU; `octavo up` sets it if it finds GPUs.
ENGINES_PER_GPU_VARIABLE = "OCTAVO_ENGINES_PER_GPU"
#: Memory of Python, torch and activations in the engine core, plus the API process, as measured with SmolLM2.
PROCESS_BYTES = 384 * MIB
KEPT_BYTES = 256 * MIB
_MALLOC_VARIABLES = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "GLIBC_TUNABLES")
_MALLOC_OPTIONS = ((-3, 32 * MIB), (-1, KEPT_BYTES))  # M_MMAP_THRESHOLD (its maximum), M_TRIM_THRESHOLD


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryInfo:
    """Memory for weights and KV cache. `total_bytes`: the limit. `available_bytes`: free now. `num_engines`: engines
    that share both, as started by `octavo up`.

    Two fields are for GPUs. `utilization`: default of --gpu-memory-utilization. `host_available_bytes`: free memory of
    the host, for swap space; None (on a CPU): swap space and KV cache share the same memory.
    """

    total_bytes: int
    available_bytes: int
    num_engines: int = 1
    utilization: float | None = None
    host_available_bytes: int | None = None

    @property
    def is_gpu(self) -> bool:
        return self.utilization is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMemory:
    """The memory of each rank of a host, and this host's KV cache settings, which apply to all of its ranks.

    `name`: the host's name; empty if there is only one. `kv_cache_memory_bytes`: from a flag or `KV_SPACE_VARIABLES`.
    """

    memory: MemoryInfo
    name: str = ""
    kv_cache_memory_bytes: int | None = None
    num_gpu_blocks_override: int | None = None
    gpu_memory_utilization: float | None = None


def host_memory(limits: CgroupLimits, root: Path = Path("/"), *, num_engines: int = 1) -> MemoryInfo:
    """Return total and available memory of the machine, or of the container if its limit is lower."""
    fields = {}
    for line in (root / "proc/meminfo").read_text().splitlines():
        key, _, value = line.partition(":")
        fields[key] = int(value.split()[0]) * 1024
    total = min(fields["MemTotal"], limits.memory_bytes or fields["MemTotal"])
    available = fields.get("MemAvailable", fields["MemFree"])
    if limits.memory_available_bytes is not None:
        available = min(available, limits.memory_available_bytes)
    return MemoryInfo(total_bytes=total, available_bytes=available, num_engines=num_engines)


def size(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB" if num_bytes >= GIB else f"{num_bytes / MIB:.1f} MiB"


def keep_freed_memory() -> None:
    """Let a step's outputs reuse the memory of earlier steps, unless the user has configured glibc's allocator."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc only
    if mallopt is not None and not any(os.environ.get(name) for name in _MALLOC_VARIABLES):
        for option, value in _MALLOC_OPTIONS:
            mallopt(option, value)
