"""Works out the masks of many sequences in one call, on threads of the library's own, while Python goes on."""

import os

from llguidance import LLExecutor, LLMatcher

from octavo_engine.grammar.state import Words

MAX_THREADS = 16


class MaskWorker:
    """Half of the CPUs at most: the rest has other work to do meanwhile."""

    def __init__(self) -> None:
        self._executor = LLExecutor(num_threads=max(1, min(MAX_THREADS, (os.cpu_count() or 1) // 2)))

    def fill(self, work: list[tuple[LLMatcher, int]], words: Words) -> None:
        """`work`: matchers, each with its row of `words`, which is contiguous. A failure shows in its matcher."""
        self._executor.unsafe_compute_mask_ptr(work, words.ctypes.data, words.shape[1] * words.itemsize, len(words))
