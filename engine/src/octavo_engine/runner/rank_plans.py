"""Plans the memory of all ranks of a model; divides the model's layers, and each host's threads and memory, among them.

Layers are divided among pipeline stages before anything is loaded: by their bytes, or as an environment variable says.
"""

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import nn

from octavo_engine.devices.cgroup import read_limits
from octavo_engine.devices.cpu_threads import plan_threads
from octavo_engine.devices.device import Device
from octavo_engine.devices.memory import HostMemory
from octavo_engine.layers.layer import Layer
from octavo_engine.layers.linear import Linear
from octavo_engine.models.registry import check_ranks
from octavo_engine.ops.rank_group import Group
from octavo_engine.ops.stages import Stages, planned_ranks, split_layers
from octavo_engine.runner.checkpoint import Checkpoint
from octavo_engine.runner.kv_cache_size import with_max_num_seqs
from octavo_engine.runner.memory_plan import (
    MemoryPlan,
    build_on_meta,
    first_dtype,
    log_length,
    longest_request,
    own_memory,
    plan_memory,
)
from octavo_engine.runner.weight_formats import StoredTensors
from octavo_engine.settings.config import EngineConfig, num_ranks, ranks_per_host
from octavo_engine.settings.records import ModelConfig
from octavo_engine.wire.errors import StartupError

_LOGGER = logging.getLogger(__name__)
PARTITION_VARIABLE = "VLLM_PP_LAYER_PARTITION"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlans:
    """`config`: settings for all ranks, with `max_num_seqs` resolved; for several ranks also `device`, `dtype` and
    `max_model_len`. `hosts`: the memory of each rank's host.

    `ranks`: memory plans with equal numbers of blocks; a rank repeats its own plan from `config` and its host's memory.
    `num_layers`: number of layers of each stage; empty for one stage.
    """

    config: EngineConfig
    hosts: Sequence[HostMemory]
    ranks: list[MemoryPlan]
    num_layers: tuple[int, ...] = ()


def divide_threads(config: EngineConfig, device: Device) -> EngineConfig:
    """Return the settings with one rank's `num_threads`; None if a variable lists each rank's CPUs.

    Raises StartupError without room for all ranks.
    """
    size = ranks_per_host(config)
    if num_ranks(config) == 1:
        return config
    limits, affinity = read_limits(), os.sched_getaffinity(0)
    parts = size if device.name == "cpu" else 1  # the variable binds no threads of a GPU's ranks
    plan = plan_threads(config.num_threads, env=os.environ, affinity=affinity, limits=limits, num_ranks=parts)
    if parts > 1 and config.num_threads is None and plan.cpus is not None:
        return config
    device.check_ranks(config, plan.num_threads)
    return replace(config, num_threads=max(1, plan.num_threads // size))


def plan_ranks(
    config: EngineConfig,
    device: Device,
    model_config: ModelConfig,
    stored: StoredTensors | None = None,
    draft: Checkpoint | None = None,
    hosts: Sequence[HostMemory] = (),
) -> RankPlans:
    """Plan the memory of all ranks; only rank 0 has a draft model. `hosts`: the hosts in order; if empty, all hosts are
    assumed to be like this one.

    Raises StartupError if a rank does not fit into its part of the memory.
    """
    size, per_stage = num_ranks(config), config.tensor_parallel_size
    hosts = hosts or [own_memory(config, device)] * config.nnodes
    hosts = [hosts[rank // ranks_per_host(config)] for rank in range(size)]
    config = with_max_num_seqs(config, min((each.memory for each in hosts), key=lambda memory: memory.total_bytes))
    if size == 1:
        plan = plan_memory(config, device, model_config, stored, draft, host=hosts[0])
        log_length(config, longest_request(config, model_config), hosts[0], plan)
        return RankPlans(config=config, hosts=hosts, ranks=[plan])

    num_layers = _divide_layers(config, device, model_config, stored)

    def plan_rank(rank: int, settings: EngineConfig) -> MemoryPlan:
        group, stages = planned_ranks(rank, per_stage, num_layers)
        own, host = draft if rank == 0 else None, hosts[rank]
        try:
            return plan_memory(settings, device, model_config, stored, own, group=group, stages=stages, host=host)
        except StartupError as error:
            if error.code != "OutOfMemory":
                raise
            where = f" on {host.name}" if host.name else ""
            text = f"rank {rank} of {size}{where}, with its part of the memory: {error}"
            raise StartupError(text, code=error.code) from error

    # The last rank of a stage has the most KV heads, and so has the last rank of a stage on each host.
    last = {*range(per_stage - 1, size, per_stage), *range(ranks_per_host(config) - 1, size, ranks_per_host(config))}
    largest = {rank: plan_rank(rank, config) for rank in sorted(last if draft is None else {0} | last)}
    dtype = str(min((each.dtype for each in largest.values()), key=lambda dtype: dtype.itemsize)).removeprefix("torch.")
    shortest = min(largest, key=lambda rank: largest[rank].max_model_len)
    max_model_len = largest[shortest].max_model_len
    log_length(config, longest_request(config, model_config), hosts[shortest], largest[shortest])
    resolved = {"dtype": dtype, "max_model_len": max_model_len, "device": device.name}
    config = replace(config, **resolved)  # type: ignore[arg-type]
    ranks = [plan_rank(rank, config) for rank in range(size)]
    num_blocks = min(each.kv.num_blocks for each in ranks)
    if config.nnodes > 1:
        found = ", ".join(f"{plan.kv.num_blocks} of {host.name}" for plan, host in zip(ranks, hosts, strict=True))
        _LOGGER.info("KV blocks: %d, the least of %s", num_blocks, found)
    num_host_blocks = min(each.kv.num_host_blocks for each in ranks)
    ranks = [with_blocks(each, num_blocks, num_host_blocks) for each in ranks]
    return RankPlans(config=config, hosts=hosts, ranks=ranks, num_layers=num_layers)


def with_blocks(plan: MemoryPlan, num_blocks: int, num_host_blocks: int) -> MemoryPlan:
    kv_bytes = num_blocks * plan.model.bytes_per_block
    kv = replace(plan.kv, num_blocks=num_blocks, num_host_blocks=num_host_blocks, kv_bytes=kv_bytes)
    return replace(plan, kv=kv)


def _divide_layers(
    config: EngineConfig, device: Device, model: ModelConfig, stored: StoredTensors | None
) -> tuple[int, ...]:
    """Return each stage's number of layers, balanced by bytes in the dtype of `first_dtype`; () for one stage.

    Raises StartupError for a device, a number of stages or a value of the environment variable that is not supported.
    """
    size, most = config.pipeline_parallel_size, model.num_layers
    if size == 1:
        return ()
    setting = f"--pipeline-parallel-size {size}"
    if device.name != "cpu":
        raise StartupError(
            f"{setting} is supported on a CPU only, and this engine computes on {device.name}: use 1, or --device cpu."
        )
    check_ranks(model, config.model_impl, config.tensor_parallel_size, size)
    if size > most:
        raise StartupError(f"{setting} exceeds the {most} layers of {model.name}: use at most {most}.")
    dtype, longest = first_dtype(config, device, model, stored), longest_request(config, model)
    first, others = (
        build_on_meta(config, device, model, stored, dtype, longest, None, Stages((1, most - 1), Group(index, 2)))
        for index in range(2)
    )
    if value := os.environ.get(PARTITION_VARIABLE):
        return _parse(value, size, most)
    layers = [*first.get_submodule("layers").children(), *others.get_submodule("layers").children()]
    layer_bytes = [_held_bytes(layer, device) for layer in layers]
    # Rotary tables, which each stage has, are in both of these models.
    of_first_bytes = _held_bytes(first, device) - _held_bytes(others, device) - layer_bytes[0] + sum(layer_bytes[1:])
    return split_layers(layer_bytes, of_first_bytes, size)


def _held_bytes(module: nn.Module, device: Device) -> int:
    """Return the bytes of packed weights: packing may copy a tied head, or keep a weight in two layouts."""
    layers = [each for each in module.modules() if isinstance(each, Layer)]
    packing = (each.bytes_added_by_packing() for each in layers if isinstance(each, Linear) and device.packs_weights)
    return sum(layer.weights_bytes() for layer in layers) + sum(packing)


def _parse(value: str, size: int, num_layers: int) -> tuple[int, ...]:
    parts = value.split(",")
    counts = tuple(int(part) for part in parts if part.strip().isdecimal())
    if len(counts) != len(parts) or len(counts) != size or 0 in counts or sum(counts) != num_layers:
        raise StartupError(
            f"{PARTITION_VARIABLE}={value}: --pipeline-parallel-size {size} needs {size} numbers, separated by commas, "
            f"each at least 1, that add up to the {num_layers} layers of the model: correct it, or unset it."
        )
    return counts
