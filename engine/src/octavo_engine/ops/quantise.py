"""Quantises weights, some rows at a time: to blocks with the `gguf` package's reference code, and to groups with torch.

A slice of rows for blocks is so small that its fp32 values stay in the CPU's cache; two threads were not faster than
one. A slice for groups is large enough to occupy a GPU.
"""

from collections.abc import Iterator

import numpy as np
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import quantize
from jaxtyping import Float
from torch import Tensor

from octavo_engine.ops.group_tensor import GroupFormat, GroupTensor, pack_nibbles
from octavo_engine.ops.native_quantised import QuantisedFormat, QuantisedTensor
from octavo_engine.ops.single_thread import single_thread

SLICE_BYTES = 1 << 19
_GROUP_SLICE_BYTES = 1 << 26


def quantised_slices(
    tensor: Float[Tensor, "out in_features"], block_format: QuantisedFormat
) -> Iterator[tuple[int, QuantisedTensor]]:
    """Yield the tensor's rows in blocks, each slice with the number of its first row.

    An infinite or NaN value gives its block an infinite or NaN scale or minimum.
    """
    kind = GGMLQuantizationType[block_format.name]
    num_rows = max(1, SLICE_BYTES // (4 * tensor.shape[1]))
    with single_thread(), np.errstate(invalid="ignore", over="ignore"):
        for first in range(0, len(tensor), num_rows):
            values = tensor[first : first + num_rows].float().numpy()
            yield first, QuantisedTensor(block_format, torch.from_numpy(quantize(values, kind)))


def quantised_groups(
    tensor: Float[Tensor, "out in_features"], group_format: GroupFormat, device: torch.device
) -> Iterator[tuple[int, GroupTensor]]:
    """Yield slices of the tensor's rows, quantised to int8 or int4 on a device, each with the index of its first row.

    An infinite or NaN value gives its group an infinite or NaN scale.
    """
    num_rows = max(1, _GROUP_SLICE_BYTES // (4 * tensor.shape[1]))
    for first in range(0, len(tensor), num_rows):
        values = tensor[first : first + num_rows].to(device).float()
        yield first, _quantise(values.reshape(len(values), -1, group_format.group_size), group_format)


def _quantise(groups: Float[Tensor, "out groups group_size"], group_format: GroupFormat) -> GroupTensor:
    if group_format.codes == "int8":
        low, high, steps = groups.new_zeros(groups.shape[:2]), groups.abs().amax(-1), 127
    else:
        low, high, steps = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0), 15
    scales = ((high - low) / steps).to(group_format.scale_dtype)
    each = scales.float().where(scales != 0, 1)
    zeros = (-low / each).round().clamp(0, steps)
    codes = (groups / each.unsqueeze(-1)).round_().add_(zeros.unsqueeze(-1)).clamp_(-127 if steps == 127 else 0, steps)
    if group_format.codes == "int8":
        octets = codes.to(torch.int8).view(torch.uint8).flatten(1)
    else:
        octets = pack_nibbles(codes.to(torch.uint8).flatten(1))
    offsets = zeros.to(torch.uint8).t().contiguous() if group_format.offsets == "zeros" else None
    return GroupTensor(format=group_format, codes=octets, scales=scales.t().contiguous(), offsets=offsets)
