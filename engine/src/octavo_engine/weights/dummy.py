"""Random weights for `--load-format dummy`: deterministic, made without a file, with a spread that is useful in tests.

Matrices have a standard deviation of GAIN / sqrt(columns), so that a normalised hidden state gives logits of standard
deviation GAIN: at transformers' usual 0.02 a small model attends uniformly and hides errors. Values come from one pool
of normal numbers, starting at an offset derived from the name: filling 14 GB takes seconds, not minutes.
"""

import hashlib
import math
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from octavo_engine.weights.fresh_memory import fresh_tensor

GAIN = 2.0
BIAS_STD = 0.1
NORM_STD = 0.1
#: A prime, so that rows of usual lengths do not repeat each other.
POOL_SIZE = 1_048_573


def dummy_weights(
    named_shapes: Iterable[tuple[str, tuple[int, ...]]], *, seed: int = 0, dtype: torch.dtype = torch.float32
) -> Iterator[tuple[str, Tensor]]:
    """Yield weights. Equal (seed, name, shape) always give equal values, independent of the other weights."""
    pool = torch.randn(POOL_SIZE, generator=torch.Generator().manual_seed(seed))
    sources: dict[tuple[float, float], Tensor] = {}  # few entries: tensors of experts share a shape
    for name, shape in named_shapes:
        mean, std = moments = _moments(name, shape)
        if moments not in sources:
            sources[moments] = (pool * std + mean).to(dtype)
        yield name, _tensor(sources[moments], name, shape)


def _tensor(source: Tensor, name: str, shape: tuple[int, ...]) -> Tensor:
    start = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little") % POOL_SIZE
    out = fresh_tensor((math.prod(shape),), source.dtype)
    done = 0
    while done < out.numel():
        count = min(POOL_SIZE - start, out.numel() - done)
        out[done : done + count] = source[start : start + count]
        done, start = done + count, 0
    return out.view(shape)


def _moments(name: str, shape: tuple[int, ...]) -> tuple[float, float]:
    if len(shape) > 1:
        return 0.0, GAIN / math.sqrt(shape[-1])
    return (0.0, BIAS_STD) if name.endswith("bias") else (1.0, NORM_STD)
