"""Group-quantised weights for GPUs: codes of 4 or 8 bits, with a scale for each group of consecutive inputs.

Kernels multiply these weights without expanding them first. Scales are stored apart from the codes, so that a group may
have any multiple of 32 inputs, and scales keep the checkpoint's dtype. (CPUs use GGUF's blocks of 32 with fp16 scales.)
"""

from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from octavo_engine.ops.native_quantised import QuantisedFormat

#: int4: 0 to 15. int8: signed. e4m3: an FP8 number. table4: an index into a table of 16 values.
Codes = Literal["int4", "int8", "e4m3", "table4"]
#: "zeros" are subtracted from codes; "minimums" are added to code * scale.
Offsets = Literal["none", "zeros", "minimums"]

#: 4-bit codes are packed in blocks of this many inputs, as in GGUF: byte i of a block has input i in its low four bits,
#: and input 16 + i in its high four bits.
CODE_BLOCK = 32
#: The zero point of int4 without offsets.
MIDDLE = 8
#: Kernels can round inputs to e4m3 if the weight has one group per row, or groups of this size.
ROUNDED_GROUP = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupFormat:
    """`name`: for logs and errors. `group_size`: number of inputs that share a scale, a multiple of 32.

    `rounds_inputs`: kernels also round the inputs to e4m3, the format of the weight. `has_order`: the weight has a
    tensor that permutes its inputs (act-order), which takes memory. Comparisons of formats ignore these two fields.
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
        """Return whether rows of `size` inputs are rounded: kernels need one group per row, or groups of 128."""
        return self.rounds_inputs and self.group_size in (size, ROUNDED_GROUP)


#: The formats in which quantised weights stay in memory: blocks on CPUs, groups on GPUs.
WeightFormat = QuantisedFormat | GroupFormat


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupTensor:
    """A weight [out, in]: (code - zero) * scale, or code * scale + minimum, rounded once to the model's dtype.

    Zero points are integers from 0 to 15; int4 without offsets has a zero point of 8. Minimums have the dtype of the
    scales. `table`: the values of table4. `order`: the original index of each input; None: inputs are not reordered.
    `input_scale`: a scale for all rounded inputs, from the checkpoint; None: each row gets its own. Weights of several
    experts have the experts as an additional first dimension.
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
    """Return the dequantised weight, its inputs in the order of `weight`; each value is rounded once, from fp32."""
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
    """Return 4-bit codes packed two to a byte, in blocks of 32. Eight codes are packed at a time, as an int64."""
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
