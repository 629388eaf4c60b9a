"""Moves weights, which every step reads completely, to huge pages: with 4 KiB pages, half the time is page walks.

Linux collapses memory that is already in use at once (`MADV_COLLAPSE`, since 6.1). On other systems, or if no 2 MiB of
contiguous memory are free, the pages stay as they are. No error is raised.
"""

import ctypes
import sys

_MADV_COLLAPSE = 25
_PAGE_BYTES = 2 << 20
_LEAST_BYTES = 256 << 10  # smaller weights stay in a CPU cache


def prefer_huge_pages(address: int, num_bytes: int) -> None:
    """Move a range of memory to 2 MiB pages, with the adjacent memory on its first and last page."""
    if num_bytes < _LEAST_BYTES or sys.platform != "linux":
        return
    start = address // _PAGE_BYTES * _PAGE_BYTES
    end = -(-(address + num_bytes) // _PAGE_BYTES) * _PAGE_BYTES
    ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _MADV_COLLAPSE)
