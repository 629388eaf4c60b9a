"""Chooses the tensors that are in blocks in memory: those of a quantised checkpoint, and those of `--quantization`.

Other quantised tensors are expanded when they are read.
"""

import logging
import math
from collections.abc import Container, Mapping

import torch

from octavo_engine.devices.device import Device
from octavo_engine.devices.memory import size
from octavo_engine.layers.linear import Linear
from octavo_engine.layers.linear_method import DenseMethod
from octavo_engine.models.model import Model
from octavo_engine.ops.native_quantised import QUANTISED_FORMATS, QuantisedFormat, kernels_expand_blocks
from octavo_engine.settings.config import EngineConfig
from octavo_engine.weights.loader import StoredTensor
from octavo_engine.wire.errors import StartupError

_LOGGER = logging.getLogger(__name__)

#: Value of `--quantization` -> format to which linear layers are quantised while they load.
LOADED_FORMATS = {"int8": QUANTISED_FORMATS["Q8_0"], "int4": QUANTISED_FORMATS["Q4_1"]}

#: A checkpoint's tensors by Hugging Face's names.
StoredTensors = Mapping[str, StoredTensor]


def kept_formats(stored: StoredTensors, device: Device, dtype: torch.dtype) -> dict[str, QuantisedFormat]:
    """Return the formats of the tensors that this device can multiply in blocks; a model may keep fewer of them."""
    if not device.packs_weights or not kernels_expand_blocks(dtype):
        return {}
    return {name: kept for name, info in stored.items() if (kept := _format(info)) is not None}


def _format(info: StoredTensor) -> QuantisedFormat | None:
    return None if info.type is None else QUANTISED_FORMATS.get(info.type.name)


def loaded_format(config: EngineConfig, device: Device) -> QuantisedFormat | None:
    """Return the format of `--quantization int8` or `int4`. Raises StartupError where no kernel multiplies it."""
    block_format = LOADED_FORMATS.get(config.quantization or "")
    if block_format is None:
        return None
    flag = f"--quantization {config.quantization}"
    if not device.packs_weights:
        raise StartupError(f"{flag} is not supported on {device.name}: use --device cpu, or omit --quantization.")
    if config.dtype not in ("auto", "bfloat16"):
        raise StartupError(f"{flag} computes in bfloat16: omit --dtype {config.dtype}, or omit --quantization.")
    if not kernels_expand_blocks(torch.bfloat16):
        raise StartupError(
            f"{flag} needs the native kernels, which are not available: install a C++ compiler (or set $CXX) and unset "
            "OCTAVO_NATIVE, or omit --quantization."
        )
    return block_format


def log_quantised(model: Model, block_format: QuantisedFormat | None) -> None:
    """Log how many tensors were quantised while they were loaded, and which linear layers could not be."""
    if block_format is None:
        return
    linears = (module for module in model.modules() if isinstance(module, Linear))
    others = [linear.spec for linear in linears if isinstance(linear.method, DenseMethod) and not linear.spec.wide]
    exceptions = ""
    if others:
        sizes = ", ".join(map(str, sorted({spec.in_features for spec in others})))
        exceptions = (
            f"; {len(others)} linear layers stay in bfloat16, as their numbers of inputs ({sizes}) are no multiples of "
            f"{block_format.num_values}: the first is {others[0].names[0]}"
        )
    num_quantised = len(model.quantised_tensors())
    _LOGGER.info("%d tensors were quantised to %s while loading%s", num_quantised, block_format.name, exceptions)


def log_expanded(stored: StoredTensors, kept: Container[str], device: Device, dtype: torch.dtype) -> None:
    """Log which quantised tensors are expanded, why, and how much memory that takes."""
    quantised = {name: info for name, info in stored.items() if info.type is None or info.type.block_elements > 1}
    expanded = {name: info for name, info in quantised.items() if name not in kept}
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
    if not kernels_expand_blocks(torch.bfloat16):
        return "the native kernels are not available"
    names = sorted({info.format_name for info in expanded.values() if _format(info) is None})
    reasons = [f"the kernels do not support {', '.join(names)}"] if names else []
    if any(_format(info) is not None for info in expanded.values()):
        reasons.append(
            "another part of a fused weight is not in blocks, or a tensor belongs to no linear layer"
            if type_name == "bfloat16"
            else f"the kernels for quantised weights compute in bfloat16; --dtype {type_name} expands them"
        )
    return "; ".join(reasons)
