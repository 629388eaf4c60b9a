"""Memory that torch's allocator keeps of an engine is free for the next one. A double stands for the GPU."""

import weakref
from pathlib import Path

import pytest
import torch
from octavo_engine.devices import device as device_module
from octavo_engine.devices.cuda_device import CudaDevice
from octavo_engine.devices.device import CpuDevice
from octavo_engine.devices.memory import MIB, MemoryInfo
from octavo_engine.ops.attention import AttentionBackend, LayerKVSpec
from octavo_engine.ops.cpu_attention import CpuBackend
from octavo_engine.runner.load import load
from octavo_engine.settings.config import EngineConfig
from octavo_engine.settings.records import ModelConfig
from octavo_testing.tiny_models import make_tiny

TOTAL_BYTES = 64 * MIB


class Allocator:
    """The counts of torch's allocator: memory that tensors left stays reserved until `empty_cache`."""

    def __init__(self) -> None:
        self.allocated = self.reserved = 0

    def allocate(self, owner: object, num_bytes: int) -> None:
        """Count memory that lives as long as its owner."""
        self.allocated += num_bytes
        self.reserved = max(self.reserved, self.allocated)
        weakref.finalize(owner, self._free, num_bytes)

    def empty_cache(self) -> None:
        self.reserved = self.allocated

    def mem_get_info(self, _device: object = None) -> tuple[int, int]:
        return TOTAL_BYTES - self.reserved, TOTAL_BYTES

    def _free(self, num_bytes: int) -> None:
        self.allocated -= num_bytes


class CountedBackend(CpuBackend):
    allocator: Allocator

    def allocate(self, num_blocks: int) -> None:
        super().allocate(num_blocks)
        self.allocator.allocate(self, num_blocks * self.bytes_per_block())
        self.cycle = self  # as torch's graphs and closures of a runner hold each other


class CountedGpu(CpuDevice):
    """Computes on the CPU; its memory is that of `CudaDevice` by the double."""

    def attention_backend(self, specs: list[LayerKVSpec], block_size: int, dtype: torch.dtype) -> AttentionBackend:
        return CountedBackend(specs, block_size, dtype)

    def memory(self, num_ranks: int = 1) -> MemoryInfo:
        return CudaDevice().memory(num_ranks)

    def reserve_bytes(self, config: EngineConfig, model: ModelConfig, dtype: torch.dtype) -> int:
        return MIB

    def release_unused_memory(self) -> None:
        CudaDevice().release_unused_memory()


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> Allocator:
    made = Allocator()
    monkeypatch.setattr(CountedBackend, "allocator", made, raising=False)
    monkeypatch.setattr(device_module, "CpuDevice", CountedGpu)
    for name in ("empty_cache", "mem_get_info"):
        monkeypatch.setattr(torch.cuda, name, getattr(made, name))
    return made


@pytest.mark.parametrize("shuts_down", [True, False], ids=["shut down", "dropped"])
def test_the_second_engine_of_a_process_gets_an_equal_cache(
    allocator: Allocator, shuts_down: bool, tmp_path: Path
) -> None:
    config = EngineConfig(model=str(make_tiny("llama", tmp_path)), dtype="float32", device="cpu", num_threads=1)
    num_blocks = []
    for _ in range(3):
        executor, ready = load(config)
        num_blocks.append(ready.num_blocks)
        assert allocator.allocated > TOTAL_BYTES // 2
        if shuts_down:
            executor.shutdown()
            assert allocator.reserved == 0
        del executor
    assert num_blocks == [num_blocks[0]] * 3
