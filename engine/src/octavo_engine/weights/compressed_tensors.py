"""Layers of the library compressed-tensors: `pack-quantized`, packed along the inputs, and `int-quantized`, in int8."""

from collections.abc import Mapping

import torch
from torch import Tensor

from octavo_engine.sources.quantised_config import QuantisedConfig
from octavo_engine.weights.layer_format import (
    FLOATS,
    BadPartError,
    LayerFormat,
    LayerTensors,
    Shape,
    num_groups,
    unpack_ints,
)


def _packed_shapes(config: QuantisedConfig, given: Mapping[str, Shape]) -> tuple[tuple[int, int], dict[str, Shape]]:
    per_int = 32 // config.bits
    out, columns = (*given["weight_packed"], 0, 0)[:2]
    size = columns * per_int
    groups = num_groups(config, size)
    shapes = {
        "weight_packed": (out, columns),
        "weight_scale": (out, groups),
        "weight_zero_point": (-(-out // per_int), groups),
        "weight_g_idx": (size,),
        "weight_shape": (2,),
    }
    return (out, size), shapes


def _read_packed(config: QuantisedConfig, parts: Mapping[str, Tensor]) -> LayerTensors:
    """Codes and zero points are stored as unsigned numbers, which are 2^(bits - 1) larger.

    If any input's group is -1, the groups are in the order of the inputs.
    """
    packed, scales, zeros = parts["weight_packed"], parts["weight_scale"], parts.get("weight_zero_point")
    groups = parts.get("weight_g_idx")
    shape, packed_shape = tuple(parts["weight_shape"].tolist()), (len(packed), packed.shape[1] * 32 // config.bits)
    if shape != packed_shape:
        raise BadPartError("weight_shape", f"the shape is {shape}, but the packed weight has {packed_shape}")
    symmetric = torch.full(scales.shape, 1 << (config.bits - 1), dtype=torch.uint8)
    return LayerTensors(
        unpack=lambda outputs: unpack_ints(packed[outputs], config.bits),
        scales=scales,
        zeros=symmetric if zeros is None else unpack_ints(zeros.t(), config.bits).t()[: len(scales)],
        groups=None if groups is None or bool((groups == -1).any()) else groups.long(),
    )


def _int8_shapes(config: QuantisedConfig, given: Mapping[str, Shape]) -> tuple[tuple[int, int], dict[str, Shape]]:
    out, size = (*given["weight"], 0, 0)[:2]
    scales = (out, num_groups(config, size))
    return (out, size), {"weight": (out, size), "weight_scale": scales, "weight_zero_point": scales}


def _read_int8(config: QuantisedConfig, parts: Mapping[str, Tensor]) -> LayerTensors:
    weight, scales, zeros = parts["weight"], parts["weight_scale"], parts.get("weight_zero_point")
    zeros = torch.zeros(scales.shape, dtype=torch.int8) if zeros is None else zeros
    return LayerTensors(unpack=lambda outputs: _unsigned(weight[outputs]), scales=scales, zeros=_unsigned(zeros))


def _unsigned(numbers: Tensor) -> Tensor:
    """Return numbers of int8 plus 128 in uint8."""
    return numbers.view(torch.uint8) ^ 128


PACK_QUANTIZED = LayerFormat(
    types={
        "weight_packed": ("I32",),
        "weight_scale": FLOATS,
        "weight_zero_point": ("I32",),
        "weight_g_idx": ("I32", "I64"),
        "weight_shape": ("I32", "I64"),
    },
    optional=frozenset({"weight_zero_point", "weight_g_idx"}),
    scales="weight_scale",
    zeros="weight_zero_point",
    groups="weight_g_idx",
    shapes=_packed_shapes,
    read=_read_packed,
)

INT_QUANTIZED = LayerFormat(
    types={"weight": ("I8",), "weight_scale": FLOATS, "weight_zero_point": ("I8",)},
    optional=frozenset({"weight_zero_point"}),
    scales="weight_scale",
    zeros="weight_zero_point",
    shapes=_int8_shapes,
    read=_read_int8,
)
