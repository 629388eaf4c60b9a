"""Memory for one tensor that goes back to the system the moment the tensor does.

From the allocator it would not: glibc raises its mmap threshold to 32 MiB as soon as large blocks are freed, takes the
next ones from the heap, and the holes between what a model keeps don't fit aligned successors. Loading a model with
8 MiB layers then ends at twice its size (measured). So large tensors get an anonymous mapping each.
"""

import math
import mmap

import torch
from torch import Tensor

MIN_BYTES = 1 << 20


def fresh_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Uninitialised for a small tensor, zero for a large one."""
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes < MIN_BYTES:
        return torch.empty(shape, dtype=dtype)
    mapping = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(mapping, dtype=dtype).view(shape)
