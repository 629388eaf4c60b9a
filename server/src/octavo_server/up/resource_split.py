"""Splits threads, KV cache memory and GPUs of one machine between several engines. Pure.

Each engine gets an equal part of the threads and of the memory that one engine would use for its KV cache, unless the
user has set the value for each engine. An engine computes its part itself from the number of engines, because only the
engine knows the size of its weights. Each engine gets one GPU; engines share GPUs if there are fewer of them.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from octavo_engine.runner.cgroup import CgroupLimits
from octavo_engine.runner.cpu_threads import BIND_VARIABLES, plan_threads
from octavo_engine.runner.memory import ENGINES_PER_GPU_VARIABLE, NUM_ENGINES_VARIABLE

GPU_VARIABLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceSettings:
    """Values that the user has set for each engine; None if unset."""

    num_threads: int | None = None
    gpu_memory_utilization: float | None = None
    device: str = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineResources:
    """`gpus`: values of `CUDA_VISIBLE_DEVICES`, one for each GPU."""

    env: Mapping[str, str]
    affinity: frozenset[int]
    limits: CgroupLimits
    gpus: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceShare:
    """Resources of each engine. `num_threads` None: the engine follows the user's own setting.

    `num_engines`: the number of engines that share the memory; 1 if the user has set each engine's share.
    """

    num_threads: int | None
    num_engines: int = 1
    bind: tuple[str, ...] | None = None  # CPUs of each engine, such as "0-3"
    gpus: tuple[str, ...] | None = None  # GPU of each engine, such as "0"

    def env(self, position: int) -> dict[str, str]:
        variables = {}
        if self.num_engines > 1:
            variables[NUM_ENGINES_VARIABLE] = str(self.num_engines)
        if self.bind is not None:
            variables[BIND_VARIABLES[0]] = self.bind[position]
        if self.gpus is not None:
            variables[GPU_VARIABLE] = self.gpus[position]
            variables[ENGINES_PER_GPU_VARIABLE] = str(self.gpus.count(self.gpus[position]))
        return variables


def split_resources(given: ResourceSettings, machine: MachineResources, num_engines: int) -> ResourceShare:
    """Compute the share of each engine. Raises StartupError for an environment variable with an invalid value."""
    return ResourceShare(
        num_threads=_threads(given, machine, num_engines),
        num_engines=num_engines if given.gpu_memory_utilization is None else 1,
        bind=_bind(machine, num_engines),
        gpus=_gpus(given, machine, num_engines),
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


def _gpus(given: ResourceSettings, machine: MachineResources, num_engines: int) -> tuple[str, ...] | None:
    if given.device == "cpu" or not machine.gpus:
        return None
    return tuple(machine.gpus[i % len(machine.gpus)] for i in range(num_engines))
