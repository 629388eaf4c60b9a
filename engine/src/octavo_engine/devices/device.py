"""`Device`: the interface to everything that differs between a CPU and an accelerator.

No other module depends on the kind of device. Supporting an accelerator takes another class with the same members and
a line in `open_device`.
"""

import logging
import os
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from octavo_engine.devices.cgroup import read_limits
from octavo_engine.devices.cpu_threads import (
    bind,
    bind_setting,
    interleave_memory,
    node_of_rank,
    nodes_to_interleave,
    plan_threads,
)
from octavo_engine.devices.cuda_device import CudaDevice, find_cuda_problem
from octavo_engine.devices.dtype import choose_cpu_dtype
from octavo_engine.devices.memory import (
    GIB,
    KV_SPACE_VARIABLES,
    NUM_ENGINES_VARIABLE,
    PROCESS_BYTES,
    MemoryInfo,
    host_memory,
)
from octavo_engine.devices.recorded_steps import RecordedSteps
from octavo_engine.devices.step_inputs import RunnableModel, StepGraphs, StepLimits
from octavo_engine.devices.transfers import Copy, Fetch, HostTimer, Timer, fetch_now
from octavo_engine.ops.attention import AttentionBackend, LayerKVSpec
from octavo_engine.ops.cpu_backend import cpu_backend
from octavo_engine.ops.cpu_cache import lazy_zeros
from octavo_engine.ops.group_tensor import WeightFormat
from octavo_engine.ops.native_library import native_library
from octavo_engine.ops.native_quantised import QuantisedFormat, kernels_expand_blocks
from octavo_engine.settings.config import EngineConfig, describe_local_ranks, describe_ranks, ranks_per_host
from octavo_engine.settings.records import ModelConfig
from octavo_engine.wire.errors import StartupError

_LOGGER = logging.getLogger(__name__)


class Device(Protocol):
    """`packs_weights`: linears are stored in a layout of this device. `compiles_late`: kernels compile when a step
    first needs them. `group_gpu`: the GPU whose tensors ranks exchange by NCCL; None: gloo exchanges host memory."""

    name: str
    torch_device: torch.device
    packs_weights: bool
    compiles_late: bool
    group_gpu: torch.device | None

    def prepare(self, config: EngineConfig) -> None:
        """Set up compute threads, device context and kernels; call it once per process, before any computation."""
        ...

    def default_dtype(self, model: ModelConfig) -> torch.dtype: ...

    def keeps(self, weight_format: WeightFormat, dtype: torch.dtype) -> bool:
        """Return whether kernels of this device multiply weights of this format by activations of this dtype."""
        ...

    def attention_backend(self, specs: list[LayerKVSpec], block_size: int, dtype: torch.dtype) -> AttentionBackend: ...

    def check_ranks(self, config: EngineConfig, num_threads: int) -> None:
        """Raise StartupError if the host has too few devices or threads for its ranks. `num_threads`: of all ranks."""
        ...

    def memory(self, num_ranks: int = 1) -> MemoryInfo:
        """Return the memory of the rank with the least, of `num_ranks` ranks."""
        ...

    def reserve_bytes(self, config: EngineConfig, model: ModelConfig, dtype: torch.dtype) -> int:
        """Return the memory that an engine needs beside weights, KV cache and swap space."""
        ...

    def kv_space_bytes(self) -> int | None:
        """Return the size of the KV cache that the environment sets; None if it sets none. Raises StartupError."""
        ...

    def host_blocks(self, num_blocks: int, bytes_per_block: int) -> Tensor:
        """Allocate [num_blocks, bytes_per_block] uint8 in host memory, suited to fast copies by this device."""
        ...

    def input_copy(self) -> Copy | None:
        """Return a function that moves a step's inputs to the device; None if they are there."""
        ...

    def step_graphs(self, model: RunnableModel, limits: StepLimits) -> StepGraphs | None:
        """Return the graphs for a model's steps; None if this device has no graphs for the model."""
        ...

    def fetch(self) -> Fetch:
        """Return a function that starts to copy results to the host."""
        ...

    def timer(self) -> Timer:
        """Start a timer of the device's work."""
        ...

    def synchronize(self) -> None:
        """Wait until the device has finished all submitted work."""
        ...

    def release_unused_memory(self) -> None:
        """Give memory back that the device's allocator keeps for later use."""
        ...

    def is_lost(self, error: Exception) -> bool:
        """Return True if the device can compute nothing after this error."""
        ...


class CpuDevice:
    def __init__(self, rank: int = 0) -> None:
        self._rank = rank
        self.name = "cpu"
        self.torch_device = torch.device("cpu")
        self.packs_weights = True
        self.compiles_late = False
        self.group_gpu: torch.device | None = None

    def prepare(self, config: EngineConfig) -> None:
        affinity, size = os.sched_getaffinity(0), ranks_per_host(config)
        plan = plan_threads(
            config.num_threads,
            env=os.environ,
            affinity=affinity,
            limits=read_limits(),
            rank=self._rank,
            num_ranks=size,
        )
        if size > 1 and bind_setting(os.environ)[1] == "auto":
            cpus = node_of_rank(self._rank, size, num_threads=plan.num_threads, affinity=affinity)
            plan = replace(plan, cpus=cpus)
        bind(plan)
        interleave_memory(nodes_to_interleave(os.sched_getaffinity(0)))
        if torch.get_num_threads() != plan.num_threads:
            torch.set_num_threads(plan.num_threads)
        native_library()

    def default_dtype(self, model: ModelConfig) -> torch.dtype:
        return choose_cpu_dtype(model)

    def keeps(self, weight_format: WeightFormat, dtype: torch.dtype) -> bool:
        return isinstance(weight_format, QuantisedFormat) and kernels_expand_blocks(dtype)

    def attention_backend(self, specs: list[LayerKVSpec], block_size: int, dtype: torch.dtype) -> AttentionBackend:
        if dtype == torch.float8_e4m3fn:
            raise StartupError(
                "--kv-cache-dtype fp8_e4m3 needs a GPU, but the device is cpu: leave it out, or use --device cuda."
            )
        return cpu_backend(specs, block_size, dtype)

    def check_ranks(self, config: EngineConfig, num_threads: int) -> None:
        if num_threads < ranks_per_host(config):
            raise StartupError(
                f"{describe_ranks(config)} needs a CPU thread for each rank{describe_local_ranks(config)}, but there "
                f"are {num_threads} (--num-threads; by default, one per CPU core): use at most "
                f"{num_threads * config.nnodes}."
            )

    def memory(self, num_ranks: int = 1) -> MemoryInfo:
        memory = host_memory(read_limits(), num_engines=int(os.environ.get(NUM_ENGINES_VARIABLE, "1")))
        total, available = memory.total_bytes // num_ranks, memory.available_bytes // num_ranks
        return replace(memory, total_bytes=total, available_bytes=available)

    def reserve_bytes(self, config: EngineConfig, model: ModelConfig, dtype: torch.dtype) -> int:
        return PROCESS_BYTES

    def kv_space_bytes(self) -> int | None:
        """Return `*_CPU_KVCACHE_SPACE`, which is in GiB, in bytes; None if it is not set or 0."""
        name = next((n for n in KV_SPACE_VARIABLES if os.environ.get(n)), None)
        if name is None:
            return None
        try:
            wanted = float(os.environ[name])
        except ValueError:
            raise StartupError(f"{name}={os.environ[name]}: this is not a number; set it in GiB.") from None
        return int(wanted * GIB) or None

    def host_blocks(self, num_blocks: int, bytes_per_block: int) -> Tensor:
        return lazy_zeros((num_blocks, bytes_per_block), torch.uint8)

    def input_copy(self) -> Copy | None:
        return None

    def step_graphs(self, model: RunnableModel, limits: StepLimits) -> StepGraphs:
        return RecordedSteps(model.forward, model.constants())

    def fetch(self) -> Fetch:
        return fetch_now

    def timer(self) -> Timer:
        return HostTimer()

    def synchronize(self) -> None:
        """Do nothing: CPU calls return when their work is done."""

    def release_unused_memory(self) -> None:
        """Do nothing: `return_freed_memory` has returned it."""

    def is_lost(self, error: Exception) -> bool:
        return False


def open_device(kind: str, rank: int = 0) -> Device:
    """Open the device of a rank. `kind`: `EngineConfig.device`. Raises StartupError for "cuda" where it fails."""
    if kind == "cpu":
        return CpuDevice(rank)
    problem = find_cuda_problem(rank)
    if problem is None:
        return CudaDevice(rank)
    if kind == "cuda":
        raise StartupError(f"--device cuda: {problem}, or use --device cpu.", code="NoDevice")
    _LOGGER.info("--device auto: computing on the CPU; no GPU is usable: %s", problem)
    return CpuDevice(rank)
