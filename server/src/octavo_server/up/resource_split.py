"""Splits threads, KV cache memory and GPUs of one machine between several engines. Pure.

Each engine gets an equal part of the threads and of the memory that one engine would use for its KV cache, unless the
user has set the value for each engine. An engine computes its part itself from the number of engines, because only the
engine knows the size of its weights. Each rank of an engine gets one GPU, and engines share GPUs if there are too few.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from octavo_engine.devices.cgroup import CgroupLimits
from octavo_engine.devices.cpu_threads import BIND_VARIABLES, plan_threads
from octavo_engine.devices.memory import ENGINES_PER_GPU_VARIABLE, NUM_ENGINES_VARIABLE
from octavo_engine.settings.config import EngineConfig

GPU_VARIABLE = "CUDA_VISIBLE_DEVICES"


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
    gpus: tuple[tuple[str, ...], ...] | None = None  # GPUs of each engine, such as ("0", "1")

    def env(self, position: int) -> dict[str, str]:
        variables = {}
        if self.num_engines > 1:
            variables[NUM_ENGINES_VARIABLE] = str(self.num_engines)
        if self.bind is not None:
            variables[BIND_VARIABLES[0]] = self.bind[position]
        if self.gpus is not None:
            own = self.gpus[position]
            variables[GPU_VARIABLE] = ",".join(own)
            variables[ENGINES_PER_GPU_VARIABLE] = str(max(sum(gpu in other for other in self.gpus) for gpu in own))
        return variables


def split_resources(given: EngineConfig, machine: MachineResources, ranks: Sequence[int]) -> ResourceShare:
    """Compute the share of each engine. `given`: its settings. `ranks`: the number of ranks of each engine.

    Raises StartupError for an environment variable with an invalid value.
    """
    num_engines = len(ranks)
    return ResourceShare(
        num_threads=_threads(given, machine, num_engines),
        num_engines=num_engines if given.gpu_memory_utilization is None else 1,
        bind=_bind(machine, ranks),
        gpus=_gpus(given, machine, ranks),
    )


def _threads(given: EngineConfig, machine: MachineResources, num_engines: int) -> int | None:
    is_set = any(machine.env.get(name) for name in ("OMP_NUM_THREADS", *BIND_VARIABLES))
    if given.num_threads is not None or is_set:
        return None
    all_threads = plan_threads(None, env={}, affinity=set(machine.affinity), limits=machine.limits).num_threads
    return max(1, all_threads // num_engines)


def _bind(machine: MachineResources, ranks: Sequence[int]) -> tuple[str, ...] | None:
    """Split a variable such as `0-3|4-7`, the CPUs of each engine or, as in vLLM, of each rank; None if it is not set,
    has another number of parts, or concerns one engine."""
    value = next((machine.env[name] for name in BIND_VARIABLES if machine.env.get(name)), "")
    parts = tuple(value.split("|"))
    if len(ranks) == 1 or len(parts) not in (len(ranks), sum(ranks)):
        return None
    return parts if len(parts) == len(ranks) else tuple("|".join(parts[i] for i in own) for own in _positions(ranks))


def _gpus(given: EngineConfig, machine: MachineResources, ranks: Sequence[int]) -> tuple[tuple[str, ...], ...] | None:
    """Choose the GPUs of each engine: none twice, so an engine with more ranks than there are GPUs gets too few."""
    if given.device == "cpu" or not machine.gpus:
        return None
    return tuple(tuple(dict.fromkeys(machine.gpus[i % len(machine.gpus)] for i in own)) for own in _positions(ranks))


def _positions(ranks: Sequence[int]) -> Iterator[range]:
    """Positions of each engine's ranks among all ranks of the machine."""
    return (range(end - size, end) for size, end in zip(ranks, accumulate(ranks), strict=True))
