"""`DraftCache`: the draft model's KV cache, in blocks of the same numbers as the target model's.

Tables, prefix hits, copies and swaps of the target's blocks thus serve both. Steps without drafts leave the draft model
out, so a block may hold KV of fewer tokens for it: `_filled` counts them, from the block's first token on.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from torch import Tensor

from octavo_engine.ops.attention import AttentionBackend
from octavo_engine.wire.plan import StepPlan

Ints = npt.NDArray[np.int64]
Table = npt.NDArray[np.int32]  # the block of each part of a sequence


class DraftCache:
    """`make_host` allocates rows for swapping; it returns None without a host tier."""

    def __init__(
        self, backend: AttentionBackend, *, block_size: int, num_blocks: int, make_host: Callable[[], Tensor | None]
    ) -> None:
        self.backend = backend
        self._block_size, self._num_blocks = block_size, num_blocks
        self._make_host = make_host
        self.allocate()

    def allocate(self) -> None:
        self.backend.allocate(self._num_blocks)
        self._host = self._make_host()
        self._filled = np.zeros(self._num_blocks, dtype=np.int64)
        self._host_filled = np.zeros(0 if self._host is None else len(self._host), dtype=np.int64)

    def release(self) -> None:
        self.backend.release()
        self._host = None

    def swap_blocks(self, plan: StepPlan) -> None:
        assert self._host is not None, "a plan swaps, but there is no host tier"
        if plan.swap_out:
            self.backend.swap_out(plan.swap_out, self._host)
            _move(self._filled, self._host_filled, plan.swap_out)
        if plan.swap_in:
            self.backend.swap_in(plan.swap_in, self._host)
            _move(self._host_filled, self._filled, plan.swap_in)

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        self.backend.copy_blocks(pairs)
        _move(self._filled, self._filled, pairs)

    def forget(self, blocks: Ints, offsets: Ints) -> None:
        """Forget the tokens of each block from its offset on: another token comes there."""
        self._filled[blocks] = np.minimum(self._filled[blocks], offsets)

    def find_missing(self, table: Table, end: int) -> int:
        """Return the first position of a sequence, up to `end`, whose token has no KV."""
        filled = self._filled[table[: -(-end // self._block_size)]]
        short = np.flatnonzero(filled < self._block_size)
        return min(end, int(short[0]) * self._block_size + int(filled[short[0]])) if len(short) else end

    def fill(self, table: Table, start: int, filled: int, end: int) -> None:
        """Record that tokens [start, filled) of a sequence have KV, as those before have; [filled, end) have none."""
        blocks = np.arange(start // self._block_size, -(-end // self._block_size))
        self._filled[table[blocks]] = np.clip(filled - blocks * self._block_size, 0, self._block_size)


def _move(source: Ints, target: Ints, pairs: list[tuple[int, int]]) -> None:
    sources, targets = zip(*pairs, strict=True)
    target[list(targets)] = source[list(sources)]
