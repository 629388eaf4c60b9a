"""Weights quantised in GGUF's blocks, for the CPU's linear kernels, which multiply the integers of these blocks.

Each product rounds its inputs to int8, row by row, so an output's bits depend only on its own row: see
`native/linear_blocks.h`. A weight's memory is allocated once, and tensors are packed into it while files are read.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import BFloat16, Int, UInt8
from torch import Tensor

from octavo_engine.ops.gather import TablePart
from octavo_engine.ops.native_library import native_library
from octavo_engine.ops.native_linear import NativeWeight, Panels, can_gate, native_panels

#: The number of outputs that the kernels' layout keeps together.
PANEL = 32


@dataclass(frozen=True, slots=True)
class QuantisedFormat:
    """A block is `num_bytes` for `num_values` of a row. `kernel_format`: `enum Format` of the kernels.

    `unpacked_bytes`: additional bytes in memory, where each 6-bit number takes a byte. `has_order`: a tensor in memory
    permutes the inputs of the weight (act-order); comparisons of formats ignore it.
    """

    name: str
    kernel_format: int
    num_bytes: int
    num_values: int = 32
    unpacked_bytes: int = 0
    has_order: bool = field(default=False, compare=False)


#: The formats that the kernels multiply, by the names of GGUF's types.
QUANTISED_FORMATS = {
    block_format.name: block_format
    for block_format in (
        QuantisedFormat("Q8_0", 1, 34),
        QuantisedFormat("Q4_0", 2, 18),
        QuantisedFormat("Q4_1", 3, 20),
        QuantisedFormat("Q5_0", 4, 22),
        QuantisedFormat("Q5_1", 5, 24),
        QuantisedFormat("Q4_K", 6, 144, num_values=256, unpacked_bytes=4),
        QuantisedFormat("Q5_K", 7, 176, num_values=256, unpacked_bytes=4),
        QuantisedFormat("Q6_K", 8, 210, num_values=256),
    )
}


@dataclass(frozen=True, slots=True)
class QuantisedTensor:
    """A tensor [*, in] in a format: the bytes of the blocks of each row.

    `order`: the original index of each input of a row; None: inputs are not reordered.
    """

    format: QuantisedFormat
    rows: UInt8[Tensor, "*rows row_bytes"]
    order: Int[Tensor, " in_features"] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.rows.shape[:-1], self.rows.shape[-1] // self.format.num_bytes * self.format.num_values)


class QuantisedWeight:
    """A weight [out, in] in panels of blocks. Outputs that were not loaded, and those of padding, are zero."""

    def __init__(
        self,
        block_format: QuantisedFormat,
        out_features: int,
        in_features: int,
        device: torch.device,
        *,
        gated: bool = False,
    ) -> None:
        assert in_features % block_format.num_values == 0, "a row is whole blocks"
        self.format, self.shape = block_format, (out_features, in_features)
        self.gated = gated and can_gate(out_features)
        num_blocks = -(-out_features // PANEL) * PANEL * (in_features // block_format.num_values)
        memory = torch.zeros(
            num_blocks * (block_format.num_bytes + block_format.unpacked_bytes), dtype=torch.uint8, device=device
        )
        self.panels = Panels(memory, self.shape, self.gated, block_format.kernel_format)
        self.nbytes = memory.nbytes

    def load(self, first: int, tensor: QuantisedTensor) -> int | None:
        """Pack a tensor's rows as outputs from `first`; return the first row with an infinite or NaN scale, if any."""
        assert tensor.format == self.format
        assert tensor.rows.is_contiguous()
        library, bad_row = native_library(), ctypes.c_int64()
        assert library is not None, "`kernels_expand_blocks` must be checked first"
        linear = self.panels.parameters()  # must live until the call returns
        library.octavo_pack_blocks(
            *(ctypes.addressof(linear), tensor.rows.data_ptr(), first, len(tensor.rows)),
            *(ctypes.addressof(bad_row), torch.get_num_threads()),
        )
        return None if bad_row.value == len(tensor.rows) else bad_row.value


def native_quantised(weights: Sequence[QuantisedWeight], bias: Tensor | None = None) -> NativeWeight:
    """Return loaded weights as one for `native_linear`, which concatenates their outputs."""
    library = native_library()
    assert library is not None, "`kernels_expand_blocks` must be checked first"
    return native_panels(library, [weight.panels for weight in weights], bias)


def kernels_expand_blocks(dtype: torch.dtype) -> bool:
    """Return whether this CPU's kernels multiply block-quantised weights by activations of this dtype."""
    return dtype == torch.bfloat16 and native_library() is not None


def gather_blocks(
    table: NativeWeight, ids: Int[Tensor, " tokens"], scale: float = 1.0, part: TablePart | None = None
) -> BFloat16[Tensor, "tokens in_features"]:
    """Return rows of a table in blocks times `scale` in a new tensor, as `gather_rows` does."""
    part = part or TablePart(0, table.out_features)
    out = torch.empty((len(ids), table.in_features), dtype=torch.bfloat16)
    ids = ids.to(torch.int64).contiguous()
    table.library.octavo_gather_blocks(
        *(table.address, part.first, part.num_rows, ids.data_ptr(), len(ids)),
        *(scale, out.data_ptr(), torch.get_num_threads()),
    )
    return out
