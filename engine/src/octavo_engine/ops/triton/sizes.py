"""Sizes of launches in plain integers: Triton's own functions take 2.6 us a call, and a layer needs some 12 calls."""


def next_power_of_2(size: int) -> int:
    """Return the least power of two that is at least `size`, which is 1 or more."""
    return 1 << (size - 1).bit_length()


def cdiv(size: int, part: int) -> int:
    """Return how many parts of a size hold `size`."""
    return -(-size // part)
