"""Configures libraries that torch uses, before torch is imported: this module does not import torch.

OpenMP: by default libgomp's threads spin for milliseconds at each barrier. On a machine with other work (the API
process is enough on two cores) a spinning thread takes the CPU from the thread that it waits for: a decode step of
SmolLM2 on two busy cores took 290 ms with the default and 35 ms with short spinning; on idle cores both take 12 ms.

Shape caches: oneDNN and torch's layer over it each cache the code generated for the last 1024 shapes, some 0.6 MB
apiece, and each number of tokens in a step is a new shape. A model with four small matrices grew by 650 MB within
4000 requests. Few shapes recur: one for each number of running sequences, and the token budget.
"""

import os

SPIN_COUNT = "1000"  # some microseconds: longer than the gap between two kernels of a step
_SPIN_VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
SHAPES = "256"
_CACHE_VARIABLES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")


def limit_openmp_spin() -> None:
    """Shorten OpenMP's spinning, unless the user has set it. Has an effect only before torch is imported."""
    if not any(os.environ.get(name) for name in _SPIN_VARIABLES):
        os.environ["GOMP_SPINCOUNT"] = SPIN_COUNT


def bound_shape_caches() -> None:
    """Bound the shape caches, unless the user has set their sizes. Has an effect only before torch is imported."""
    for name in _CACHE_VARIABLES:
        os.environ.setdefault(name, SHAPES)
