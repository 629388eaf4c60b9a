"""The CUDA attention backend on CPU tensors, where Triton's interpreter runs its kernels."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from octavo_engine.ops.attention import LayerKVSpec
from octavo_engine.ops.cuda_backend import CudaBackend
from octavo_engine.runner.device import CpuDevice


@contextmanager
def triton_attention() -> Iterator[None]:
    """Let engines that start meanwhile compute attention with the Triton kernels."""

    def backend(self: CpuDevice, specs: list[LayerKVSpec], block_size: int, dtype: torch.dtype) -> CudaBackend:
        return CudaBackend(specs, block_size, dtype, self.torch_device)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CpuDevice, "attention_backend", backend)
        yield
