"""A stand-in for oneDNN on CPUs with matrix instructions, which pack bf16 weights in a layout of their own.

`pytest --other-onednn` runs any test with the stand-in, on any CPU. The engine then keeps each bf16 weight in two
layouts and uses the stand-in for many rows, as it uses the real oneDNN on CPUs with AMX. Other dtypes use the real one.
"""

from typing import Any

import pytest
import torch
from octavo_engine.ops import packed_linear
from torch import Tensor


class OtherOneDNN:
    """The operators of `torch.ops.mkldnn` that the engine calls."""

    def _is_mkldnn_bf16_supported(self) -> bool:
        return True

    def _reorder_linear_weight(self, weight: Tensor, rows_hint: int) -> Tensor:
        if weight.dtype != torch.bfloat16:
            packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, rows_hint)
            return packed
        return weight.t().contiguous()

    def _linear_pointwise(self, x: Tensor, packed: Tensor, bias: Tensor | None, *post: Any) -> Tensor:
        if packed.dtype != torch.bfloat16:
            result: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, *post)
            return result
        sums = x.float() @ packed.float()
        return (sums if bias is None else sums + bias.float()).to(x.dtype)

    def data_ptr(self, packed: Tensor) -> int:
        return packed.data_ptr() if packed.dtype == torch.bfloat16 else int(torch.ops.mkldnn.data_ptr(packed))

    def _nbytes(self, packed: Tensor) -> int:
        return packed.nbytes if packed.dtype == torch.bfloat16 else int(torch.ops.mkldnn._nbytes(packed))

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.ops.mkldnn, name)


def install_other_onednn(patch: pytest.MonkeyPatch) -> OtherOneDNN:
    other = OtherOneDNN()
    patch.setattr(packed_linear, "_mkldnn", lambda: other)
    patch.setattr(packed_linear, "_has_matrix_instructions", lambda: True)
    return other
