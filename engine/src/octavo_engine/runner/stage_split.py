"""Divides a model's layers among pipeline stages, before anything is loaded: by bytes, or as a variable says."""

import os
from collections.abc import Callable

from torch import nn

from octavo_engine.devices.device import Device
from octavo_engine.layers.layer import Layer
from octavo_engine.layers.linear import Linear
from octavo_engine.models.model import Model
from octavo_engine.models.registry import check_ranks
from octavo_engine.ops.rank_group import Group
from octavo_engine.ops.stages import Stages, split_layers
from octavo_engine.settings.config import EngineConfig
from octavo_engine.settings.records import ModelConfig
from octavo_engine.wire.errors import StartupError

PARTITION_VARIABLE = "VLLM_PP_LAYER_PARTITION"


def divide_layers(
    config: EngineConfig, device: Device, model: ModelConfig, build: Callable[[Stages], Model]
) -> tuple[int, ...]:
    """Return the number of layers of each stage; () for one stage. `build`: makes a stage's model without memory.

    Raises StartupError for a device, a number of stages or a value of the variable that is not supported.
    """
    size, most = config.pipeline_parallel_size, model.num_layers
    if size == 1:
        return ()
    setting = f"--pipeline-parallel-size {size}"
    if device.name != "cpu":
        raise StartupError(
            f"{setting} is supported on a CPU only, and this engine computes on {device.name}: use 1, or --device cpu."
        )
    check_ranks(model, config.model_impl, config.tensor_parallel_size, size)
    if size > most:
        raise StartupError(f"{setting} exceeds the {most} layers of {model.name}: use at most {most}.")
    first, others = (build(Stages((1, most - 1), Group(index, 2))) for index in range(2))
    if value := os.environ.get(PARTITION_VARIABLE):
        return _parse(value, size, most)
    layers = [*first.get_submodule("layers").children(), *others.get_submodule("layers").children()]
    layer_bytes = [_held_bytes(layer, device) for layer in layers]
    # Rotary tables, which each stage has, are in both of these models.
    of_first_bytes = _held_bytes(first, device) - _held_bytes(others, device) - layer_bytes[0] + sum(layer_bytes[1:])
    return split_layers(layer_bytes, of_first_bytes, size)


def _held_bytes(module: nn.Module, device: Device) -> int:
    """Return the bytes of the packed weights: a tied head may become a copy, a weight may be kept in two layouts."""
    layers = [each for each in module.modules() if isinstance(each, Layer)]
    packing = (each.bytes_added_by_packing() for each in layers if isinstance(each, Linear) and device.packs_weights)
    return sum(layer.weights_bytes() for layer in layers) + sum(packing)


def _parse(value: str, size: int, num_layers: int) -> tuple[int, ...]:
    parts = value.split(",")
    counts = tuple(int(part) for part in parts if part.strip().isdecimal())
    if len(counts) != len(parts) or len(counts) != size or 0 in counts or sum(counts) != num_layers:
        raise StartupError(
            f"{PARTITION_VARIABLE}={value}: --pipeline-parallel-size {size} needs {size} numbers, separated by commas, "
            f"each at least 1, that add up to the {num_layers} layers of the model: correct it, or unset it."
        )
    return counts
