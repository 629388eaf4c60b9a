"""Keys of random noise by (seed, position): a token gets the same noise on any replica and in any batch.

A counter-based generator (two rounds of the SplitMix64 finaliser over a Weyl sequence) replaces one generator per
request: it has no state to store, swap or transfer, and a whole batch takes a few numpy calls.
"""

import numpy as np
import numpy.typing as npt

from octavo_engine.wire.sampling import DRAW_VERSION

_WEYL = np.uint64(0x9E3779B97F4A7C15)
_DOMAIN = np.uint64(0x6F637461766F0000 | DRAW_VERSION)  # "octavo"


def draw_keys(seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
    """Return a key of 64 bits for each seed and position."""
    with np.errstate(over="ignore"):
        stream = _mix(seeds ^ _DOMAIN)
        return _mix(stream + (positions.astype(np.uint64) + np.uint64(1)) * _WEYL)


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: npt.NDArray[np.uint64] = x ^ (x >> np.uint64(31))
    return mixed
