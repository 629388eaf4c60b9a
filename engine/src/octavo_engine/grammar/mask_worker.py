"""Computes the grammar masks of many sequences in one call, on llguidance's own threads, without the GIL."""

import os

from llguidance import LLExecutor, LLMatcher

from octavo_engine.grammar.state import Words

MAX_THREADS = 16


class MaskWorker:
    """A pool of at most half as many threads as CPUs, and at most 16: the other CPUs serve other work."""

    def __init__(self) -> None:
        self._executor = LLExecutor(num_threads=max(1, min(MAX_THREADS, (os.cpu_count() or 1) // 2)))

    def fill(self, work: list[tuple[LLMatcher, int]], words: Words) -> None:
        """Write masks to `words` (contiguous). `work`: matchers and their rows. A matcher records its own failure."""
        self._executor.unsafe_compute_mask_ptr(work, words.ctypes.data, words.shape[1] * words.itemsize, len(words))
