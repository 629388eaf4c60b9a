"""Selects the CPU attention backend: the compiled kernel if it is available and supports the model, else torch."""

import torch

from octavo_engine.ops.attention import AttentionBackend, LayerKVSpec
from octavo_engine.ops.cpu_attention import CpuBackend
from octavo_engine.ops.native_attention import NativeBackend, can_serve
from octavo_engine.ops.native_library import native_library


def cpu_backend(specs: list[LayerKVSpec], block_size: int, dtype: torch.dtype) -> AttentionBackend:
    library = native_library()
    if library is not None and can_serve(library, block_size, dtype):
        return NativeBackend(library, specs, block_size, dtype)
    return CpuBackend(specs, block_size, dtype)
