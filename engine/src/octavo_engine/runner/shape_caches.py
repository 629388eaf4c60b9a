"""Bounds what torch's CPU kernels remember. Imports no torch: it reads these settings when it loads.

oneDNN and torch's layer over it each keep the code generated for the last 1024 shapes, some 0.6 MB apiece; each number
of tokens in a step is a new shape. A model with four small matrices grew by 650 MB within 4 000 requests so. The shapes
that come again are few: as many steps as there are sequences, and the token budget.
"""

import os

SHAPES = "256"
_VARIABLES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")


def bound_shape_caches() -> None:
    """Before torch is imported; later it has no effect. A user's own choice stands."""
    for name in _VARIABLES:
        os.environ.setdefault(name, SHAPES)
