"""Estimates, before loading, whether a model fits into memory in a dtype, so that `--dtype auto` chooses one that fits.

The estimate uses the memory of the machine or the limit of its container, not the memory that is free at the moment, so
that equal pods make equal choices.
"""

import logging

import torch

from octavo_engine.config import EngineConfig, ModelConfig
from octavo_engine.layers.linear import Linear
from octavo_engine.models.model import Model
from octavo_engine.models.registry import build_model
from octavo_engine.runner.device import Device
from octavo_engine.runner.memory import GIB, MIB

_LOGGER = logging.getLogger(__name__)
#: Memory of Python, torch and activations in the engine core, plus the API process, measured with SmolLM2.
PROCESS_BYTES = 384 * MIB


def fitting_dtype(
    config: EngineConfig, device: Device, model_config: ModelConfig, *, dtype: torch.dtype, max_model_len: int
) -> torch.dtype:
    """Return `dtype`, or bfloat16 if float32 does not fit."""
    if dtype != torch.float32:
        return dtype
    total_bytes = device.memory().total_bytes
    needed_bytes = PROCESS_BYTES + _model_bytes(config, device, model_config, dtype, max_model_len)
    if needed_bytes <= total_bytes:
        return dtype
    _LOGGER.info(
        "dtype auto: bfloat16, as float32 would take %.2f of %.2f GiB of memory; --dtype float32 selects it anyway",
        *(needed_bytes / GIB, total_bytes / GIB),
    )
    return torch.bfloat16


def planned_weights_bytes(model: Model) -> int:
    """Return the bytes of weights once packed: packing may copy a tied head, and keep a weight in two layouts."""
    linears = (module for module in model.modules() if isinstance(module, Linear))
    return model.weights_bytes() + sum(linear.bytes_added_by_packing() for linear in linears)


def _model_bytes(
    config: EngineConfig, device: Device, model_config: ModelConfig, dtype: torch.dtype, max_model_len: int
) -> int:
    """Return the bytes of weights, swap space, and the KV cache that the flags set or one full-length request needs."""
    model = build_model(model_config, dtype=dtype, device="meta", max_model_len=max_model_len)
    bytes_per_block = device.attention_backend(model.kv_specs(), config.block_size, dtype).bytes_per_block()
    if config.num_gpu_blocks_override is not None:
        kv_bytes = config.num_gpu_blocks_override * bytes_per_block
    elif config.kv_cache_memory_bytes is not None:
        kv_bytes = config.kv_cache_memory_bytes
    else:
        kv_bytes = -(-max_model_len // config.block_size) * bytes_per_block
    return planned_weights_bytes(model) + kv_bytes + int(config.swap_space * GIB)
