"""Median seconds of a call on a device."""

import statistics
import time
from collections.abc import Callable
from itertools import pairwise

import torch


def median_s(work: Callable[[], object], device: str, *, most_s: float = 0.5, least: int = 3) -> float:
    """Return the median seconds of a call after two that compile and warm up; on a GPU, by its events."""
    work()
    once = max(_clocked_s(work, device), 1e-6)
    if device != "cuda":
        return statistics.median(_clocked_s(work, device) for _ in range(least))
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(max(least, min(50, int(most_s / once))) + 1)]
    marks[0].record()
    for mark in marks[1:]:
        work()
        mark.record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in pairwise(marks)) / 1e3


def _clocked_s(work: Callable[[], object], device: str) -> float:
    wait: Callable[[], object] = torch.cuda.synchronize if device == "cuda" else int
    wait()
    began = time.perf_counter()
    work()
    wait()
    return time.perf_counter() - began
