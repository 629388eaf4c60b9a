"""The device abstraction: everything that differs between a CPU and an accelerator is behind `Device`.

Nobody else asks what kind of device this is. An accelerator is another class with the same members and one line in
`open_device`.
"""

import os
from typing import Protocol

import torch
from torch import Tensor

from octavo_engine.config import EngineConfig, ModelConfig
from octavo_engine.ops.attention import AttentionBackend, LayerKVSpec
from octavo_engine.ops.cpu_backend import cpu_backend
from octavo_engine.ops.cpu_cache import lazy_zeros
from octavo_engine.runner.cgroup import read_limits
from octavo_engine.runner.cpu_threads import bind, plan_threads
from octavo_engine.runner.dtype import choose_cpu_dtype
from octavo_engine.runner.memory import GIB, KV_SPACE_VARIABLES, MemoryInfo, free_memory_for_kv, host_memory
from octavo_engine.wire.errors import StartupError


class Device(Protocol):
    name: str
    torch_device: torch.device

    def prepare(self, config: EngineConfig) -> None:
        """Once per process, before anything computes: threads, context."""
        ...

    def default_dtype(self, model: ModelConfig) -> torch.dtype: ...

    def attention_backend(self, specs: list[LayerKVSpec], block_size: int, dtype: torch.dtype) -> AttentionBackend: ...

    def memory(self) -> MemoryInfo: ...

    def default_kv_bytes(self, memory: MemoryInfo, config: EngineConfig) -> int:
        """How much the KV cache gets when no flag says it; `memory` as it is with the weights loaded."""
        ...

    def host_blocks(self, num_blocks: int, bytes_per_block: int) -> Tensor:
        """[num_blocks, bytes_per_block] uint8 in host memory that this device copies to and from fast."""
        ...

    def synchronize(self) -> None: ...


class CpuDevice:
    def __init__(self) -> None:
        self.name = "cpu"
        self.torch_device = torch.device("cpu")

    def prepare(self, config: EngineConfig) -> None:
        affinity = os.sched_getaffinity(0)
        plan = plan_threads(config.num_threads, env=os.environ, affinity=affinity, limits=read_limits())
        bind(plan)
        if torch.get_num_threads() != plan.num_threads:
            torch.set_num_threads(plan.num_threads)

    def default_dtype(self, model: ModelConfig) -> torch.dtype:
        return choose_cpu_dtype(model)

    def attention_backend(self, specs: list[LayerKVSpec], block_size: int, dtype: torch.dtype) -> AttentionBackend:
        return cpu_backend(specs, block_size, dtype)

    def memory(self) -> MemoryInfo:
        return host_memory(read_limits())

    def default_kv_bytes(self, memory: MemoryInfo, config: EngineConfig) -> int:
        """`*_CPU_KVCACHE_SPACE` GiB if set and not 0; else half of what is available, up to 4 GiB."""
        name = next((n for n in KV_SPACE_VARIABLES if os.environ.get(n)), None)
        if name is None:
            return free_memory_for_kv(memory)
        try:
            wanted = float(os.environ[name])
        except ValueError:
            raise StartupError(f"{name}={os.environ[name]}: not a number of GiB.") from None
        return int(wanted * GIB) or free_memory_for_kv(memory)

    def host_blocks(self, num_blocks: int, bytes_per_block: int) -> Tensor:
        return lazy_zeros((num_blocks, bytes_per_block), torch.uint8)

    def synchronize(self) -> None:
        """A CPU's work is done when a call returns."""


def open_device(kind: str) -> Device:
    """`kind` as in `EngineConfig.device`."""
    if kind in ("auto", "cpu"):
        return CpuDevice()
    raise StartupError(f"--device {kind} is not supported by this version: use cpu.")
