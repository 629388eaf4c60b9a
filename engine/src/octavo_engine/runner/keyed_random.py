"""Uniform numbers keyed by (seed, position): a token gets the same number on any replica and in any batch.

A counter-based generator (two rounds of the SplitMix64 finaliser over a Weyl sequence) replaces one generator per
request: it has no state to store, swap or transfer, and a whole batch takes a few numpy calls.
"""

import numpy as np
import numpy.typing as npt

_WEYL = np.uint64(0x9E3779B97F4A7C15)
_DOMAIN = np.uint64(0x6F637461766F0001)  # "octavo", version 1 of the definition


def uniforms(seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Return numbers in [0, 1) with 53 random bits each."""
    with np.errstate(over="ignore"):
        stream = _mix(seeds ^ _DOMAIN)
        bits = _mix(stream + (positions.astype(np.uint64) + np.uint64(1)) * _WEYL)
    uniform: npt.NDArray[np.float64] = (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return uniform


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: npt.NDArray[np.uint64] = x ^ (x >> np.uint64(31))
    return mixed
