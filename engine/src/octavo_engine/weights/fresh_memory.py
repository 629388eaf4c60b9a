"""Allocates tensors whose memory returns to the system as soon as the tensor is freed.

glibc's allocator would keep the memory: it raises its mmap threshold to 32 MiB once large blocks are freed,
allocates later blocks on the heap, and the holes between retained tensors do not fit aligned new ones. Loading a model
with 8 MiB layers then takes twice its size (measured). So each large tensor gets an anonymous mapping.
"""

import math
import mmap

import torch
from torch import Tensor

MIN_BYTES = 1 << 20


def fresh_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Allocate a tensor; below 1 MiB its contents are undefined, above they are zero."""
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes < MIN_BYTES:
        return torch.empty(shape, dtype=dtype)
    mapping = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(mapping, dtype=dtype).view(shape)
