"""`LayerFormat`: names, shapes and unpacking of the tensors of a quantised layer, for each kind of checkpoint."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo_engine.sources.quantised_config import QuantisedConfig

Shape = tuple[int, ...]

FLOATS = ("F16", "BF16", "F32")


class BadPartError(Exception):
    """A tensor of a layer that cannot be read: its name within the layer, what is wrong with it, and the remedy."""

    def __init__(self, part: str, what: str, remedy: str = "download the checkpoint again") -> None:
        super().__init__(part, what, remedy)
        self.part, self.what, self.remedy = part, what, remedy


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTensors:
    """The tensors of a layer. A weight is (number - zero) * scale * factor.

    `unpack`: returns the numbers of a slice of outputs, [outputs, inputs]: integers as uint8 (int8 without zero
    points), others as fp32 in a new tensor. A slice begins at a multiple of eight. `codes`: returns a slice's codes in
    uint8, if codes are not integers; `table`: the numbers that 4-bit codes stand for. `scales`, `zeros`: [outputs,
    groups]; zeros are uint8. `groups`: group of each input, unless groups are consecutive. `shape`, `group_size`: set
    if the header does not have them. `input_scale`: scale by which the layer rounds its inputs, if any.
    """

    unpack: Callable[[slice], Tensor]
    scales: Tensor
    codes: Callable[[slice], Tensor] | None = None
    table: Tensor | None = None
    zeros: Tensor | None = None
    groups: Tensor | None = None
    factor: float = 1.0
    shape: tuple[int, int] | None = None
    group_size: int | None = None
    input_scale: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerFormat:
    """`codes`: "int" if GGUF's blocks can hold the codes; otherwise their name. `types`: accepted dtypes, by names of
    parts. `scales`, `zeros`, `groups`: names of the parts that have them.

    `optional`: parts that a layer may lack; only a symmetric one may lack zero points. `shapes`: returns the weight's
    shape [out, in] and the expected shapes of all parts, given the actual shapes. `read`: raises BadPartError.
    `layer_shape`: reads the weight's shape and group size from the part `shaped_by`, for layers whose header does not
    have them; raises BadPartError.
    """

    codes: str = "int"
    types: Mapping[str, tuple[str, ...]]
    scales: str
    zeros: str = ""
    groups: str = ""
    optional: frozenset[str] = frozenset()
    shapes: Callable[[QuantisedConfig, Mapping[str, Shape]], tuple[tuple[int, int], dict[str, Shape]]]
    read: Callable[[QuantisedConfig, Mapping[str, Tensor]], LayerTensors]
    shaped_by: str | None = None
    layer_shape: Callable[[Tensor], tuple[tuple[int, int], int]] | None = None

    def split(self, name: str) -> tuple[str, str] | None:
        """Split a tensor's name into the names of layer and part; None if the tensor is no part of a layer."""
        part = next((part for part in self.types if name.endswith(f".{part}")), None)
        return None if part is None else (name.removesuffix(f".{part}"), part)


def num_groups(config: QuantisedConfig, size: int) -> int:
    return -(-size // (config.group_size or max(size, 1)))


def unpack_ints(packed: Tensor, bits: int) -> Tensor:
    """Return the codes of packed rows [rows, columns * 32 / bits] as uint8. The first code is in the lowest bits."""
    octets = packed.contiguous().view(torch.uint8)
    if bits == 8:
        return octets
    pairs = octets.to(torch.int16)
    return (pairs << 4).bitwise_or_(pairs).bitwise_and_(0x0F0F).view(torch.uint8)


def transpose(packed: Tensor) -> Tensor:
    """Return a contiguous transpose of a tensor's columns; torch copies fastest from a contiguous source."""
    return packed.contiguous().t().contiguous()
