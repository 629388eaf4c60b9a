"""Quantises weights to blocks by the reference code of the `gguf` package, a slice of rows at a time.

A slice is small enough for its values in fp32 to stay in the CPU's cache. Two threads were not faster than one.
"""

from collections.abc import Iterator

import numpy as np
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import quantize
from jaxtyping import Float
from torch import Tensor

from octavo_engine.ops.native_quantised import QuantisedFormat, QuantisedTensor
from octavo_engine.ops.single_thread import single_thread

SLICE_BYTES = 1 << 19


def quantised_slices(
    tensor: Float[Tensor, "out in_features"], block_format: QuantisedFormat
) -> Iterator[tuple[int, QuantisedTensor]]:
    """Yield the tensor's rows in blocks, each slice with the number of its first row.

    A value that is infinite or NaN gives a block with such a scale or minimum.
    """
    kind = GGMLQuantizationType[block_format.name]
    num_rows = max(1, SLICE_BYTES // (4 * tensor.shape[1]))
    with single_thread(), np.errstate(invalid="ignore", over="ignore"):
        for first in range(0, len(tensor), num_rows):
            values = tensor[first : first + num_rows].float().numpy()
            yield first, QuantisedTensor(block_format, torch.from_numpy(quantize(values, kind)))
