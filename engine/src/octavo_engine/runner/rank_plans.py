"""Divides the threads and the memory of a host among the ranks of a model, and plans the memory of each rank."""

import os
from dataclasses import dataclass, replace

from octavo_engine.devices.cgroup import read_limits
from octavo_engine.devices.cpu_threads import plan_threads
from octavo_engine.devices.device import Device
from octavo_engine.devices.memory import MemoryInfo, with_max_num_seqs
from octavo_engine.ops.group import Group
from octavo_engine.runner.draft_source import DraftSource
from octavo_engine.runner.kept_blocks import StoredTensors
from octavo_engine.runner.memory_plan import MemoryPlan, plan_memory
from octavo_engine.settings.config import EngineConfig, ModelConfig
from octavo_engine.wire.errors import StartupError


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlans:
    """`config`: the settings of each rank; the number of sequences is resolved, and with several ranks device, type and
    length. `memory`: of each rank, of the one that has the least.

    `ranks`: plans with equal numbers of blocks. A rank with these settings and memory makes its plan again.
    """

    config: EngineConfig
    memory: MemoryInfo
    ranks: list[MemoryPlan]


def divide_threads(config: EngineConfig, device: Device) -> EngineConfig:
    """Return the settings with the threads of one rank; None if each rank has those of its part of a variable.

    Raises StartupError without room for all ranks.
    """
    size = config.tensor_parallel_size
    if size == 1:
        return config
    limits, affinity = read_limits(), os.sched_getaffinity(0)
    parts = size if device.name == "cpu" else 1  # the variable binds no threads of a GPU's ranks
    plan = plan_threads(config.num_threads, env=os.environ, affinity=affinity, limits=limits, num_ranks=parts)
    if parts > 1 and config.num_threads is None and plan.cpus is not None:
        return config
    device.check_ranks(size, plan.num_threads)
    return replace(config, num_threads=max(1, plan.num_threads // size))


def plan_ranks(
    config: EngineConfig,
    device: Device,
    model_config: ModelConfig,
    stored: StoredTensors | None = None,
    draft: DraftSource | None = None,
) -> RankPlans:
    """Plan the memory of all ranks, of which rank 0 alone has a draft model.

    Raises StartupError if one of them does not fit into its part of the memory.
    """
    size = config.tensor_parallel_size
    memory = device.memory(size)
    config = with_max_num_seqs(config, memory)
    if size == 1:
        plan = plan_memory(config, device, model_config, stored, draft, memory=memory)
        return RankPlans(config=config, memory=memory, ranks=[plan])

    def plan_rank(rank: int, settings: EngineConfig) -> MemoryPlan:
        try:
            own = draft if rank == 0 else None
            return plan_memory(settings, device, model_config, stored, own, group=Group(rank, size), memory=memory)
        except StartupError as error:
            if error.code != "OutOfMemory":
                raise
            raise StartupError(
                f"rank {rank} of {size}, with its part of the memory: {error}", code=error.code
            ) from error

    largest = [plan_rank(size - 1, config)]  # the last rank has the most KV heads
    if draft is not None:
        largest.append(plan_rank(0, config))
    dtype = str(min((each.dtype for each in largest), key=lambda dtype: dtype.itemsize)).removeprefix("torch.")
    max_model_len = min(each.max_model_len for each in largest)
    resolved = {"dtype": dtype, "max_model_len": max_model_len, "device": device.name}
    config = replace(config, **resolved)  # type: ignore[arg-type]
    ranks = [plan_rank(rank, config) for rank in range(size)]
    num_blocks = min(each.kv.num_blocks for each in ranks)
    num_host_blocks = min(each.kv.num_host_blocks for each in ranks)
    ranks = [with_blocks(each, num_blocks, num_host_blocks) for each in ranks]
    return RankPlans(config=config, memory=memory, ranks=ranks)


def with_blocks(plan: MemoryPlan, num_blocks: int, num_host_blocks: int) -> MemoryPlan:
    kv_bytes = num_blocks * plan.model.bytes_per_block
    kv = replace(plan.kv, num_blocks=num_blocks, num_host_blocks=num_host_blocks, kv_bytes=kv_bytes)
    return replace(plan, kv=kv)
