"""Chooses which weights stay quantised in memory: those of a quantised checkpoint, and those that `--quantization`
quantises.

Other quantised tensors are expanded when they are read.
"""

import logging
import math
from collections.abc import Container, Iterator, Mapping
from dataclasses import replace
from itertools import chain

import torch

from octavo_engine.devices.device import Device
from octavo_engine.devices.memory import size
from octavo_engine.layers.group_method import GroupMethod
from octavo_engine.layers.linear import Linear
from octavo_engine.layers.linear_method import DenseMethod
from octavo_engine.layers.moe import Experts
from octavo_engine.models.model import Model
from octavo_engine.ops.group_tensor import CODE_BLOCK, GroupFormat, WeightFormat
from octavo_engine.ops.native_quantised import QUANTISED_FORMATS
from octavo_engine.settings.config import EngineConfig
from octavo_engine.sources.quantised_config import QuantisedConfig
from octavo_engine.weights.loader import StoredTensor, group_format, has_order
from octavo_engine.wire.errors import StartupError

_LOGGER = logging.getLogger(__name__)

#: The formats to which `--quantization` quantises linear layers while they load, on a CPU and (below) on a GPU.
LOADED_FORMATS = {"int8": QUANTISED_FORMATS["Q8_0"], "int4": QUANTISED_FORMATS["Q4_1"]}
LOADED_GROUPS = {
    "int8": GroupFormat(name="int8", codes="int8", group_size=128),
    "int4": GroupFormat(name="int4", codes="int4", group_size=128, offsets="zeros"),
}

#: A checkpoint's tensors by Hugging Face's names.
StoredTensors = Mapping[str, StoredTensor]


def kept_formats(stored: StoredTensors, device: Device, dtype: torch.dtype) -> dict[str, WeightFormat]:
    """Return the formats in which this device can multiply the stored tensors; a model may use fewer of them."""
    found = ((name, info, _kept_format(info, device, dtype)) for name, info in stored.items())
    return {name: replace(kept, has_order=has_order(info)) for name, info, kept in found if kept is not None}


def _kept_format(info: StoredTensor, device: Device, dtype: torch.dtype) -> WeightFormat | None:
    groups = group_format(info)
    kept = [] if groups is None else [groups, replace(groups, rounds_inputs=False)]
    if found := next((each for each in kept if device.keeps(each, dtype)), None):
        return found
    blocks = None if info.type is None else QUANTISED_FORMATS.get(info.type.name)  # may read all scales
    return blocks if blocks is not None and device.keeps(blocks, dtype) else None


def loaded_format(config: EngineConfig, device: Device) -> WeightFormat | None:
    """Return the format of `--quantization int8` or `int4`. Raises StartupError where no kernel multiplies it."""
    if config.quantization not in LOADED_FORMATS:
        return None
    formats = (LOADED_FORMATS[config.quantization], LOADED_GROUPS[config.quantization])
    kept = next((each for each in formats if device.keeps(each, torch.bfloat16)), None)
    flag = f"--quantization {config.quantization}"
    dtypes = ("bfloat16", "float16") if isinstance(kept, GroupFormat) else ("bfloat16",)
    if config.dtype not in ("auto", *dtypes):
        computes = " or ".join(dtypes)
        raise StartupError(f"{flag} computes in {computes}: omit --dtype {config.dtype}, or omit --quantization.")
    if kept is None:
        raise StartupError(
            f"{flag} needs the native kernels, which are not available: install a C++ compiler (or set $CXX) and unset "
            "OCTAVO_NATIVE, or omit --quantization."
        )
    return kept


def log_quantised(model: Model, block_format: WeightFormat | None) -> None:
    """Log how many tensors were quantised to `block_format`, and which linear layers could not be quantised."""
    if block_format is None:
        return
    dense = [
        linear.spec for linear in _linears(model) if isinstance(linear.method, DenseMethod) and not linear.spec.wide
    ]
    exceptions, dtype = "", str(model.build.dtype).removeprefix("torch.")
    if others := [spec for spec in dense if spec.in_features % CODE_BLOCK]:
        sizes = ", ".join(map(str, sorted({spec.in_features for spec in others})))
        exceptions = (
            f"; {len(others)} linear layers stay in {dtype}, as their numbers of inputs ({sizes}) are not multiples of "
            f"{CODE_BLOCK}: the first is {others[0].names[0]}"
        )
    if others := [spec for spec in dense if not spec.in_features % CODE_BLOCK]:
        exceptions += (
            f"; {len(others)} linear layers stay in {dtype}, as another part of their fused weight, or another expert, "
            f"has another format: the first is {others[0].names[0]}"
        )
    num_quantised = len(model.quantised_tensors())
    _LOGGER.info("%d tensors were quantised to %s while loading%s", num_quantised, block_format.name, exceptions)


def _linears(model: Model) -> Iterator[Linear]:
    """Yield all linear layers. Experts whose weights share a tensor are not registered as modules of the model."""
    stacked = (each.each for each in model.modules() if isinstance(each, Experts) and each.stacks)
    modules = chain(model.modules(), *(mlp.modules() for mlp in chain(*stacked)))
    return (module for module in modules if isinstance(module, Linear))


def log_activations(config: QuantisedConfig | None, model: Model) -> None:
    """Log the arithmetic of a checkpoint that was made for quantised activations."""
    if config is None or config.activation_bits is None:
        return
    linears = [linear.method for linear in _linears(model) if not linear.spec.wide]
    rounding = sum(isinstance(method, GroupMethod) and method.rounds_inputs for method in linears)
    here = "here they have 16 bits, but 8 bits where CPU kernels multiply quantised blocks"
    if rounding:
        here = f"{rounding} linear layers round them to FP8 (e4m3), {len(linears) - rounding} use 16 bits"
    _LOGGER.info("the checkpoint was made for activations of %d bits; %s", config.activation_bits, here)


def log_expanded(stored: StoredTensors, kept: Container[str], device: Device, dtype: torch.dtype) -> None:
    """Log which quantised tensors are expanded, why, and how much memory that takes."""
    others = {name: info for name, info in stored.items() if name not in kept}
    expanded = {name: info for name, info in others.items() if info.type is None or info.type.block_elements > 1}
    if not expanded:
        return
    type_name = str(dtype).removeprefix("torch.")
    _LOGGER.info(
        "%d quantised tensors are expanded to %s and take %s instead of %s: %s",
        *(len(expanded), type_name, size(sum(math.prod(i.shape) for i in expanded.values()) * dtype.itemsize)),
        *(size(sum(i.num_bytes for i in expanded.values())), _reason(expanded, device, dtype)),
    )


def _reason(expanded: StoredTensors, device: Device, dtype: torch.dtype) -> str:
    if not any(device.keeps(each, torch.bfloat16) for each in (LOADED_FORMATS["int8"], LOADED_GROUPS["int8"])):
        return "the native kernels are not available"
    formats = {name: _kept_format(info, device, torch.bfloat16) for name, info in expanded.items()}
    names = sorted({info.format_name for name, info in expanded.items() if formats[name] is None})
    reasons = [f"the kernels do not support {', '.join(names)}"] if names else []
    if known := [each for each in formats.values() if each is not None]:
        computes = "16 bits" if isinstance(known[0], GroupFormat) else "bfloat16"
        reasons.append(
            "another part of their fused weight has another format, or their layers cannot multiply quantised weights"
            if device.keeps(known[0], dtype)
            else f"the kernels for quantised weights compute in {computes}; --dtype "
            f"{str(dtype).removeprefix('torch.')} expands them"
        )
    return "; ".join(reasons)
