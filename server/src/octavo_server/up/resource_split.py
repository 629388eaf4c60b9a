"""Splits threads and KV cache memory of one machine between several engines. Pure.

Each engine gets an equal part of the threads and of the memory that one engine would use for its KV cache, unless the
user has set the value for each engine. An engine computes its part itself from the number of engines, because only the
engine knows the size of its weights.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from octavo_engine.runner.cgroup import CgroupLimits
from octavo_engine.runner.cpu_threads import BIND_VARIABLES, plan_threads
from octavo_engine.runner.memory import NUM_ENGINES_VARIABLE


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceSettings:
    """Values that the user has set for each engine; None if unset."""

    num_threads: int | None = None
    gpu_memory_utilization: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineResources:
    env: Mapping[str, str]
    affinity: frozenset[int]
    limits: CgroupLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceShare:
    """Resources of each engine. `num_threads` None: the engine follows the user's own setting.

    `num_engines`: the number of engines that share the memory; 1 if the user has set each engine's share.
    """

    num_threads: int | None
    num_engines: int = 1
    bind: tuple[str, ...] | None = None  # CPUs of each engine, such as "0-3"

    def env(self, position: int) -> dict[str, str]:
        found = {}
        if self.num_engines > 1:
            found[NUM_ENGINES_VARIABLE] = str(self.num_engines)
        if self.bind is not None:
            found[BIND_VARIABLES[0]] = self.bind[position]
        return found


def split_resources(given: ResourceSettings, machine: MachineResources, num_engines: int) -> ResourceShare:
    """Compute the share of each engine. Raises StartupError for an environment variable with an invalid value."""
    return ResourceShare(
        num_threads=_threads(given, machine, num_engines),
        num_engines=num_engines if given.gpu_memory_utilization is None else 1,
        bind=_bind(machine, num_engines),
    )


def _threads(given: ResourceSettings, machine: MachineResources, num_engines: int) -> int | None:
    is_set = any(machine.env.get(name) for name in ("OMP_NUM_THREADS", *BIND_VARIABLES))
    if given.num_threads is not None or is_set:
        return None
    all_threads = plan_threads(None, env={}, affinity=set(machine.affinity), limits=machine.limits).num_threads
    return max(1, all_threads // num_engines)


def _bind(machine: MachineResources, num_engines: int) -> tuple[str, ...] | None:
    """Split a variable such as `0-3|4-7`, the CPUs of each engine, which vLLM uses for its ranks; None if it is not set
    or has another number of parts than there are engines."""
    value = next((machine.env[name] for name in BIND_VARIABLES if machine.env.get(name)), "")
    parts = tuple(value.split("|"))
    return parts if len(parts) == num_engines > 1 else None
