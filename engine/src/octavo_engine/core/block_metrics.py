"""`BlockLifeSampler`: samples every n-th allocation of a device block and measures the block's life until eviction.

A life ends when a cached block is allocated again. A block whose content was never registered in the prefix cache is
not counted. A block is used whenever an admitted sequence finds it in the cache. No decision depends on these times.
"""

from collections import deque
from collections.abc import Callable, Iterable
from itertools import pairwise

from octavo_engine.core.blocks import BlockPool, Evicted
from octavo_engine.core.events import KVDeltas
from octavo_engine.wire.plan import BlockId
from octavo_engine.wire.records import BlockLife

MAX_USES = 5  # the latest uses are kept


class BlockLifeSampler:
    def __init__(self, every: int, clock: Callable[[], float]) -> None:
        self._every = every
        self._clock = clock
        self._num_allocated = 0
        self._born_s: dict[BlockId, float] = {}
        self._uses_s: dict[BlockId, deque[float]] = {}
        self._ended: list[BlockLife] = []

    def record_allocation(self, blocks: Iterable[BlockId]) -> None:
        for block in blocks:
            self._num_allocated += 1
            self._born_s.pop(block, None)
            if self._num_allocated % self._every == 0:
                now = self._born_s[block] = self._clock()
                self._uses_s[block] = deque((now,), maxlen=MAX_USES)

    def record_use(self, blocks: Iterable[BlockId]) -> None:
        for block in blocks:
            if block in self._born_s:
                self._uses_s[block].append(self._clock())

    def record_eviction(self, block: BlockId) -> None:
        born_s = self._born_s.pop(block, None)
        if born_s is not None:
            now, uses = self._clock(), list(self._uses_s[block])
            gaps = [later - earlier for earlier, later in pairwise(uses)]
            self._ended.append(BlockLife(lifetime_s=now - born_s, idle_s=now - uses[-1], reuse_gaps_s=gaps))

    def pop_ended(self) -> list[BlockLife]:
        ended, self._ended = self._ended, []
        return ended


class InstrumentedBlockPool(BlockPool):
    """A block pool that reports allocations and evictions to a `BlockLifeSampler`."""

    def __init__(
        self,
        num_blocks: int,
        *,
        lives: BlockLifeSampler,
        evicted: Evicted | None = None,
        deltas: KVDeltas | None = None,
    ) -> None:
        super().__init__(num_blocks, evicted=evicted, deltas=deltas)
        self.lives = lives

    def allocate(self, count: int) -> list[BlockId]:
        blocks = super().allocate(count)
        self.lives.record_allocation(blocks)
        return blocks

    def _evict(self, block: BlockId) -> None:
        self.lives.record_eviction(block)
        super()._evict(block)
