"""The GPU's kernels on CPU tensors, in Triton's interpreter."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from octavo_engine.ops import triton_devices
from octavo_engine.ops.attention import LayerKVSpec
from octavo_engine.ops.cuda_backend import CudaBackend
from octavo_engine.runner.device import CpuDevice


@contextmanager
def triton_kernels() -> Iterator[None]:
    """Let engines that start meanwhile compute with the Triton kernels."""

    def backend(self: CpuDevice, specs: list[LayerKVSpec], block_size: int, dtype: torch.dtype) -> CudaBackend:
        return CudaBackend(specs, block_size, dtype, self.torch_device, num_programs=5)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CpuDevice, "attention_backend", backend)
        patch.setattr(triton_devices, "DEVICES", {"cpu"})
        yield
