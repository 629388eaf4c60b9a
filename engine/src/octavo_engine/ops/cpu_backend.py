"""Selects the CPU attention backend: the compiled kernel if it is available and supports the model, else torch."""

import functools
import logging

import torch

from octavo_engine.ops.attention import AttentionBackend, LayerKVSpec
from octavo_engine.ops.cpu_attention import CpuBackend
from octavo_engine.ops.native_attention import NativeBackend, can_serve
from octavo_engine.ops.native_library import native_library

_LOGGER = logging.getLogger(__name__)


def cpu_backend(specs: list[LayerKVSpec], block_size: int, dtype: torch.dtype) -> AttentionBackend:
    library = native_library()
    if library is not None and can_serve(block_size, dtype):
        return NativeBackend(library, specs, block_size, dtype)
    if library is not None:  # if there is none, its loader has logged the reason
        warn_once(block_size, dtype)
    return CpuBackend(specs, block_size, dtype)


@functools.cache
def warn_once(block_size: int, dtype: torch.dtype) -> None:
    """Log the reason for the slow path, once per process: planning and loading each create a backend."""
    _LOGGER.warning(
        "attention runs in torch, several times slower than the compiled kernel, because of %s with --block-size %d: "
        "choose --dtype bfloat16 or float32 and a block size of 16, 32, 64 or 128",
        *(str(dtype).removeprefix("torch."), block_size),
    )
