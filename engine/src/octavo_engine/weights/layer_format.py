"""`LayerFormat`: how the tensors of a quantised layer are named, shaped and unpacked, for each kind of checkpoint."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo_engine.sources.quantised_config import QuantisedConfig

Shape = tuple[int, ...]

FLOATS = ("F16", "BF16", "F32")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTensors:
    """The tensors of a layer. `unpack`: returns the codes of a slice of outputs, [outputs, inputs] as int16.

    `scales`, `zeros`: [outputs, groups]; zeros are int16. `groups`: the group of each input, if the checkpoint has it.
    `shape`: of the weight, if the checkpoint has it.
    """

    unpack: Callable[[slice], Tensor]
    scales: Tensor
    zeros: Tensor
    groups: Tensor | None = None
    shape: Shape | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerFormat:
    """`types`: accepted types by the names of the parts. `scales`, `zeros`, `groups`: names of these parts.

    `optional`: parts that a layer may lack; it may lack zero points only if it is symmetric.
    `shapes`: returns the weight's shape [out, in], and the shapes of the parts that follow from it and from those that
    are given.
    """

    types: Mapping[str, tuple[str, ...]]
    scales: str
    zeros: str
    groups: str = ""
    optional: frozenset[str] = frozenset()
    shapes: Callable[[QuantisedConfig, Mapping[str, Shape]], tuple[tuple[int, int], dict[str, Shape]]]
    read: Callable[[QuantisedConfig, Mapping[str, Tensor]], LayerTensors]


def num_groups(config: QuantisedConfig, size: int) -> int:
    return -(-size // (config.group_size or max(size, 1)))


def unpack_ints(packed: Tensor, bits: int) -> Tensor:
    """Return the codes of packed rows [rows, columns * 32 / bits] as int16; the lowest bits are the first code."""
    octets = packed.contiguous().view(torch.uint8)
    if bits == 4:
        octets = torch.stack((octets & 15, octets >> 4), -1).flatten(-2)
    return octets.to(torch.int16)
