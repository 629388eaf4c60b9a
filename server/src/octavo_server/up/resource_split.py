"""Splits threads and KV cache memory of one machine between several engines. Pure.

A single engine uses every CPU core and up to half of the free memory. Each of several engines gets an equal part of
these cores and this memory, unless the user has set the threads or the size of the KV cache for each engine.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from octavo_engine.runner.cgroup import CgroupLimits
from octavo_engine.runner.cpu_threads import BIND_VARIABLES, plan_threads
from octavo_engine.runner.memory import GIB, KV_SPACE_VARIABLES, MemoryInfo, free_memory_for_kv


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceSettings:
    """Values that the user has set for each engine; None if unset."""

    num_threads: int | None = None
    kv_cache_memory_bytes: int | None = None
    num_gpu_blocks_override: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineResources:
    env: Mapping[str, str]
    affinity: frozenset[int]
    limits: CgroupLimits
    memory: MemoryInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceShare:
    """Resources of each engine. None: `octavo up` sets no value, and the user's flag or variable applies."""

    num_threads: int | None
    kv_bytes: int | None
    bind: tuple[str, ...] | None = None  # CPUs of each engine, such as "0-3"

    def env(self, position: int) -> dict[str, str]:
        found = {}
        if self.kv_bytes is not None:
            found[KV_SPACE_VARIABLES[0]] = f"{self.kv_bytes / GIB:.6f}"
        if self.bind is not None:
            found[BIND_VARIABLES[0]] = self.bind[position]
        return found


def split_resources(given: ResourceSettings, machine: MachineResources, num_engines: int) -> ResourceShare:
    """Compute the share of each engine. Raises StartupError for an environment variable with an invalid value."""
    return ResourceShare(
        num_threads=_threads(given, machine, num_engines),
        kv_bytes=_kv_bytes(given, machine, num_engines),
        bind=_bind(machine, num_engines),
    )


def _threads(given: ResourceSettings, machine: MachineResources, num_engines: int) -> int | None:
    is_set = any(machine.env.get(name) for name in ("OMP_NUM_THREADS", *BIND_VARIABLES))
    if given.num_threads is not None or is_set:
        return None
    all_threads = plan_threads(None, env={}, affinity=set(machine.affinity), limits=machine.limits).num_threads
    return max(1, all_threads // num_engines)


def _kv_bytes(given: ResourceSettings, machine: MachineResources, num_engines: int) -> int | None:
    is_set = any(machine.env.get(name) for name in KV_SPACE_VARIABLES)
    if is_set or given.kv_cache_memory_bytes is not None or given.num_gpu_blocks_override is not None:
        return None
    return free_memory_for_kv(machine.memory, num_engines)


def _bind(machine: MachineResources, num_engines: int) -> tuple[str, ...] | None:
    """Split a variable such as `0-3|4-7`, the CPUs of each engine, which vLLM uses for its ranks; None if it is not set
    or has another number of parts than there are engines."""
    value = next((machine.env[name] for name in BIND_VARIABLES if machine.env.get(name)), "")
    parts = tuple(value.split("|"))
    return parts if len(parts) == num_engines > 1 else None
