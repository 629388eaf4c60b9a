"""Chooses the tensors of a GGUF checkpoint that stay in their blocks in memory; others are expanded when read."""

import logging
import math
from collections.abc import Container, Mapping

import torch

from octavo_engine.ops.native_blocks import BLOCK_FORMATS, BlockFormat, kernels_expand_blocks
from octavo_engine.runner.device import Device
from octavo_engine.runner.memory import size
from octavo_engine.sources.gguf_header import GGUFTensor

_LOGGER = logging.getLogger(__name__)

#: A checkpoint's tensors by Hugging Face's names.
StoredTensors = Mapping[str, GGUFTensor]


def kept_formats(stored: StoredTensors, device: Device, dtype: torch.dtype) -> dict[str, BlockFormat]:
    """Return the formats of the tensors that this device can multiply in blocks; a model may keep fewer of them."""
    if not device.packs_weights or not kernels_expand_blocks(dtype):
        return {}
    return {name: BLOCK_FORMATS[info.type.name] for name, info in stored.items() if info.type.name in BLOCK_FORMATS}


def log_expanded(stored: StoredTensors, kept: Container[str], device: Device, dtype: torch.dtype) -> None:
    """Log which quantised tensors are expanded, why, and how much memory that takes."""
    expanded = {name: i for name, i in stored.items() if i.type.block_elements > 1 and name not in kept}
    if not expanded:
        return
    type_name = str(dtype).removeprefix("torch.")
    _LOGGER.info(
        "%d quantised tensors are expanded to %s and take %s instead of %s: %s",
        *(len(expanded), type_name, size(sum(math.prod(i.shape) for i in expanded.values()) * dtype.itemsize)),
        *(size(sum(i.num_bytes for i in expanded.values())), _reason(expanded, device, type_name)),
    )


def _reason(expanded: StoredTensors, device: Device, type_name: str) -> str:
    if not device.packs_weights:
        return f"the kernels for quantised weights do not run on {device.name}"
    if type_name != "bfloat16":
        return f"the kernels for quantised weights compute in bfloat16; --dtype {type_name} expands them"
    if not kernels_expand_blocks(torch.bfloat16):
        return "the native kernels are not available"
    types = sorted({info.type.name for info in expanded.values()} - BLOCK_FORMATS.keys())
    reasons = [f"the kernels do not support {', '.join(types)}"] if types else []
    if any(info.type.name in BLOCK_FORMATS for info in expanded.values()):
        reasons.append("another part of a fused weight is not in blocks, or a tensor belongs to no linear layer")
    return "; ".join(reasons)
