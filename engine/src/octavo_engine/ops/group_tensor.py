"""Weights in groups, which a GPU multiplies as they are: codes of 4 or 8 bits, and a scale for each group of inputs.

Scales lie apart from the codes, so that a group may have any multiple of 32 inputs, and a scale may have the type that
the checkpoint gives it. (GGUF's blocks of 32, which a CPU multiplies, hold an fp16 scale each.)
"""

from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from octavo_engine.ops.native_quantised import QuantisedFormat

#: int4: 0 to 15. int8: signed. e4m3: an FP8 number. table4: the number of one of 16 values.
Codes = Literal["int4", "int8", "e4m3", "table4"]
#: "zeros" are subtracted from codes; "minimums" are added to code * scale.
Offsets = Literal["none", "zeros", "minimums"]

#: Codes of 4 bits come in blocks of this many inputs, as in GGUF: byte i of a block has input i in its low bits, and
#: input 16 + i in its high bits.
CODE_BLOCK = 32
#: The zero point of int4 without offsets.
MIDDLE = 8
#: The group size for which kernels multiply rounded inputs, if a row has several groups.
ROUNDED_GROUP = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupFormat:
    """`name`: for logs and errors. `group_size`: the inputs that share a scale, a multiple of 32.

    `rounds_inputs`: only for e4m3: kernels that multiply such groups round the inputs to e4m3, too. `has_order`: the
    weights have an order of their inputs, which takes memory. Neither counts when two formats are compared.
    """

    name: str
    codes: Codes
    group_size: int
    scale_dtype: torch.dtype = torch.float16
    offsets: Offsets = "none"
    rounds_inputs: bool = field(default=False, compare=False)
    has_order: bool = field(default=False, compare=False)

    @property
    def num_values(self) -> int:
        """A row may be cut at multiples of this number of inputs."""
        return self.group_size

    @property
    def codes_per_byte(self) -> int:
        return 1 if self.codes in ("int8", "e4m3") else 2

    def rounds_rows_of(self, size: int) -> bool:
        """Return True if rows of this size are rounded: kernels can do that for one group, or for groups of 128."""
        return self.rounds_inputs and self.group_size in (size, ROUNDED_GROUP)


#: Formats that are kept in memory: blocks, which a CPU multiplies, and groups, which a GPU multiplies.
WeightFormat = QuantisedFormat | GroupFormat


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupTensor:
    """A weight [out, in]: (code - zero) * scale, or code * scale + minimum, rounded once to the model's dtype.

    A zero is a whole number from 0 to 15, and a minimum has the type of the scales; int4 without either has a zero of
    8. `table`: the values of table4. `order`: the original index of each input of a row; None: inputs are not
    reordered. `input_scale`: the scale of all rounded inputs, if the checkpoint has one; None: each row has its own.
    The weights of several experts have the experts as a further first dimension.
    """

    format: GroupFormat
    codes: UInt8[Tensor, "*experts out code_bytes"]
    scales: Float[Tensor, "*experts groups out"]
    offsets: Tensor | None = None  # [*experts, groups, out]
    table: Float[Tensor, "*experts 16"] | None = None
    order: Int[Tensor, "*experts in_features"] | None = None
    input_scale: float | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return *self.codes.shape[:-1], self.codes.shape[-1] * self.format.codes_per_byte

    @property
    def nbytes(self) -> int:
        parts = (self.codes, self.scales, self.offsets, self.table, self.order)
        return sum(part.nbytes for part in parts if part is not None)

    def expert(self, index: int) -> "GroupTensor":
        """Return a view of the weight of one of several experts."""
        offsets, table, order = (
            None if part is None else part[index] for part in (self.offsets, self.table, self.order)
        )
        codes, scales = self.codes[index], self.scales[index]
        return replace(self, codes=codes, scales=scales, offsets=offsets, table=table, order=order)


def expand_groups(weight: GroupTensor, dtype: torch.dtype) -> Float[Tensor, "out in_features"]:
    """Return the expanded weight in a dtype, with the inputs in the order of the rows. Each value is rounded once, from
    fp32."""
    (out, size), group_size = weight.shape, weight.format.group_size
    values = _numbers(weight).view(out, -1, group_size)
    scales = weight.scales.t().float().unsqueeze(-1)
    if weight.format.offsets == "minimums":
        assert weight.offsets is not None
        values = torch.addcmul(weight.offsets.t().float().unsqueeze(-1), values, scales)
    elif weight.format.offsets == "zeros":
        assert weight.offsets is not None
        values = (values - weight.offsets.t().unsqueeze(-1)) * scales
    else:
        values = (values - MIDDLE if weight.format.codes == "int4" else values) * scales
    return values.reshape(out, size).to(dtype)


def pack_nibbles(codes: UInt8[Tensor, "out in_features"]) -> UInt8[Tensor, "out code_bytes"]:
    """Return codes of 4 bits, two to a byte, in blocks of 32. Eight codes are packed at a time, as an int64."""
    blocks = codes.contiguous().view(torch.int64).view(len(codes), -1, 2, CODE_BLOCK // 16)
    return (blocks[:, :, 0] | blocks[:, :, 1] << 4).view(torch.uint8).flatten(1)


def _numbers(weight: GroupTensor) -> Float[Tensor, "out in_features"]:
    codes, kind = weight.codes, weight.format.codes
    if kind == "int8":
        return codes.view(torch.int8).float()
    if kind == "e4m3":
        return codes.view(torch.float8_e4m3fn).float()
    blocks = codes.view(len(codes), -1, CODE_BLOCK // 2)
    numbers = torch.cat((blocks & 15, blocks >> 4), -1).flatten(1)
    if kind == "int4":
        return numbers.float()
    assert weight.table is not None
    return weight.table.index_select(0, numbers.flatten().int()).view(numbers.shape)
