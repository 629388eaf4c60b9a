"""Settings of the libraries below torch, made before torch is imported. This module imports no torch.

OpenMP: by default libgomp's threads spin for milliseconds at each barrier. On a machine with other work (the API
process is enough on two cores) a spinning thread takes the CPU from the thread that it waits for: a decode step of
SmolLM2 on two busy cores took 290 ms with the default and 35 ms with short spinning; on idle cores both take 12 ms.

Shape caches: oneDNN and torch's layer over it each cache the code generated for the last 1024 shapes, some 0.6 MB
apiece, and each number of tokens in a step is a new shape. A model with four small matrices grew by 650 MB within
4000 requests. Few shapes recur: one for each number of running sequences, and the token budget.

Freed memory: glibc maps and unmaps outputs of megabytes, so each step would write to new pages: 29,000 page faults for
a prompt of 1024 tokens of SmolLM2, 3 % of its time. Up to `KEPT_BYTES` of free memory stay with the process instead.
"""

import ctypes
import os

SPIN_COUNT = "1000"  # some microseconds: longer than the gap between two kernels of a step
_SPIN_VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
SHAPES = "256"
_CACHE_VARIABLES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
KEPT_BYTES = 256 << 20
_MALLOC_VARIABLES = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "GLIBC_TUNABLES")
_MALLOC_OPTIONS = ((-3, 32 << 20), (-1, KEPT_BYTES))  # M_MMAP_THRESHOLD, of which this is the most; M_TRIM_THRESHOLD


def limit_openmp_spin() -> None:
    """Shorten OpenMP's spinning, unless the user has set it. Has an effect only before torch is imported."""
    if not any(os.environ.get(name) for name in _SPIN_VARIABLES):
        os.environ["GOMP_SPINCOUNT"] = SPIN_COUNT


def bound_shape_caches() -> None:
    """Bound the shape caches, unless the user has set their sizes. Has an effect only before torch is imported."""
    for name in _CACHE_VARIABLES:
        os.environ.setdefault(name, SHAPES)


def keep_freed_memory() -> None:
    """Let outputs of one step use the memory of earlier ones, unless the user has set up glibc's allocator."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc only
    if mallopt is not None and not any(os.environ.get(name) for name in _MALLOC_VARIABLES):
        for option, value in _MALLOC_OPTIONS:
            mallopt(option, value)
