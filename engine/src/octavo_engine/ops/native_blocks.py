"""Weights in blocks of 32 values, as GGUF stores them, for the linear kernels, which expand them in the CPU's cache.

An output has the bits that it has with a bf16 weight of the same values: see `native/expand.h`. The memory of a weight
is allocated once, and tensors are packed into it as they are read.
"""

import ctypes
from dataclasses import dataclass

import torch
from jaxtyping import BFloat16, Int, UInt8
from torch import Tensor

from octavo_engine.ops.native_library import native_library
from octavo_engine.ops.native_linear import LinearParameters, NativeWeight, can_gate, native_panels

_PANEL = 32


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """A block is `num_bytes` for 32 values of a row. `kernel_format`: `enum Format` of the kernels."""

    name: str
    kernel_format: int
    num_bytes: int
    num_values: int = 32


#: The formats that the kernels expand, by the names of GGUF's types.
BLOCK_FORMATS = {
    block_format.name: block_format
    for block_format in (BlockFormat("Q8_0", 1, 34), BlockFormat("Q4_0", 2, 18), BlockFormat("Q4_1", 3, 20))
}


@dataclass(frozen=True, slots=True)
class BlockTensor:
    """A tensor [*, in] in a format: the bytes of the blocks of each row."""

    format: BlockFormat
    rows: UInt8[Tensor, "*rows row_bytes"]

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.rows.shape[:-1], self.rows.shape[-1] // self.format.num_bytes * self.format.num_values)


class BlockWeight:
    """A weight [out, in] in panels of blocks. Outputs that were not loaded, and those of padding, are zero."""

    def __init__(
        self,
        block_format: BlockFormat,
        out_features: int,
        in_features: int,
        device: torch.device,
        *,
        gated: bool = False,
    ) -> None:
        assert in_features % block_format.num_values == 0, "a row is whole blocks"
        self.format, self.shape = block_format, (out_features, in_features)
        self.gated = gated and can_gate(out_features)
        num_blocks = -(-out_features // _PANEL) * _PANEL * (in_features // block_format.num_values)
        self.panels = torch.zeros(num_blocks * block_format.num_bytes, dtype=torch.uint8, device=device)
        self.nbytes = self.panels.nbytes

    def load(self, first: int, tensor: BlockTensor) -> int | None:
        """Pack a tensor's rows as outputs from `first`; return the first row with an infinite or NaN scale, if any."""
        assert tensor.format == self.format
        assert tensor.rows.is_contiguous()
        library, bad_row = native_library(), ctypes.c_int64()
        assert library is not None, "`kernels_expand_blocks` must be checked first"
        linear = LinearParameters(None, None, *reversed(self.shape), self.gated, self.format.kernel_format)
        library.octavo_pack_blocks(
            *(ctypes.addressof(linear), self.panels.data_ptr(), tensor.rows.data_ptr(), first, len(tensor.rows)),
            *(ctypes.addressof(bad_row), torch.get_num_threads()),
        )
        return None if bad_row.value == len(tensor.rows) else bad_row.value

    def native(self, bias: Tensor | None = None) -> NativeWeight:
        """Return the weight for `native_linear`, with a layer's bias. Call it once everything is loaded."""
        library = native_library()
        assert library is not None, "`kernels_expand_blocks` must be checked first"
        kernel_format = self.format.kernel_format
        return native_panels(
            library, self.panels, bias, shape=self.shape, gated=self.gated, kernel_format=kernel_format
        )


def kernels_expand_blocks(dtype: torch.dtype) -> bool:
    """Return True if the kernels multiply weights in blocks by activations of this type on this CPU."""
    return dtype == torch.bfloat16 and native_library() is not None


def gather_blocks(
    table: NativeWeight, ids: Int[Tensor, " tokens"], scale: float = 1.0
) -> BFloat16[Tensor, "tokens in_features"]:
    """Return rows of a table in blocks times `scale` in a new tensor; an id without a row gives a row of NaN."""
    out = torch.empty((len(ids), table.in_features), dtype=torch.bfloat16)
    ids = ids.to(torch.int64).contiguous()
    table.library.octavo_gather_blocks(
        *(table.address, ids.data_ptr(), len(ids), scale, out.data_ptr(), torch.get_num_threads())
    )
    return out
