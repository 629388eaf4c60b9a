"""GPTQ's layers: `qweight` is packed along the inputs, `qzeros` along the outputs; `g_idx` is each input's group."""

from collections.abc import Mapping

from torch import Tensor

from octavo_engine.sources.quantised_config import QuantisedConfig
from octavo_engine.weights.layer_format import (
    FLOATS,
    LayerFormat,
    LayerTensors,
    Shape,
    num_groups,
    transpose,
    unpack_ints,
)


def _shapes(config: QuantisedConfig, given: Mapping[str, Shape]) -> tuple[tuple[int, int], dict[str, Shape]]:
    per_int = 32 // config.bits
    rows, out = (*given["qweight"], 0, 0)[:2]
    size = rows * per_int
    groups = num_groups(config, size)
    zeros = (groups, -(-out // per_int))
    return (out, size), {"qweight": (rows, out), "qzeros": zeros, "scales": (groups, out), "g_idx": (size,)}


def _read(config: QuantisedConfig, parts: Mapping[str, Tensor]) -> LayerTensors:
    packed, scales = parts["qweight"], parts["scales"].t()
    one_each = sum(1 << shift for shift in range(0, 32, config.bits))
    zeros = parts["qzeros"] + config.zero_offset * one_each  # before unpacking: a stored -1 has borrowed
    return LayerTensors(
        unpack=lambda outputs: unpack_ints(transpose(packed[:, outputs]), config.bits),
        scales=scales,
        zeros=unpack_ints(zeros, config.bits).t()[: len(scales)],
        groups=parts["g_idx"].long() if "g_idx" in parts else None,
    )


GPTQ = LayerFormat(
    types={"qweight": ("I32",), "qzeros": ("I32",), "scales": FLOATS, "g_idx": ("I32", "I64")},
    scales="scales",
    zeros="qzeros",
    groups="g_idx",
    optional=frozenset({"g_idx"}),
    shapes=_shapes,
    read=_read,
)
