"""Moving memory to huge pages changes no contents and never fails."""

import ctypes
import sys

import pytest
import torch
from octavo_engine.ops import native_linear as module
from octavo_engine.ops.native_linear import prefer_huge_pages


def test_contents_are_unchanged() -> None:
    values = torch.arange(3 << 20, dtype=torch.int32)
    prefer_huge_pages(values.data_ptr() + 4096, 10 << 20)
    assert torch.equal(values, torch.arange(3 << 20, dtype=torch.int32))


def test_unmapped_memory_raises_no_error() -> None:
    prefer_huge_pages(1 << 30, 64 << 20)


def test_whole_pages_are_requested(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []

    class Libc:
        def madvise(self, address: ctypes.c_void_p, size: ctypes.c_size_t, advice: int) -> int:
            asked.append((address.value or 0, size.value))
            return -1

    monkeypatch.setattr(module.ctypes, "CDLL", lambda name: Libc())
    prefer_huge_pages((6 << 20) + 100, 1 << 20)
    prefer_huge_pages((6 << 20) - 1, 1 << 20)
    prefer_huge_pages(6 << 20, 4096)  # small enough for the CPU cache
    assert asked == [(6 << 20, 2 << 20), (4 << 20, 4 << 20)]
    monkeypatch.setattr(sys, "platform", "darwin")
    prefer_huge_pages(6 << 20, 1 << 20)
    assert len(asked) == 2
