"""`BlockLives`: follows every n-th device block from being taken to the eviction of its content, for statistics only.

A life ends when a cached block is taken for something else; one whose content nobody could find is no life at all.
Uses are the admissions that found the block in the cache. Nothing here influences a decision.
"""

from collections import deque
from collections.abc import Callable, Iterable
from itertools import pairwise

from octavo_engine.core.blocks import BlockPool, Evicted
from octavo_engine.core.events import KVDeltas
from octavo_engine.wire.plan import BlockId
from octavo_engine.wire.records import BlockLife

MAX_USES = 5  # the latest are kept


class BlockLives:
    def __init__(self, every: int, clock: Callable[[], float]) -> None:
        self._every = every
        self._clock = clock
        self._num_taken = 0
        self._born_s: dict[BlockId, float] = {}
        self._uses_s: dict[BlockId, deque[float]] = {}
        self._ended: list[BlockLife] = []

    def taken(self, blocks: Iterable[BlockId]) -> None:
        for block in blocks:
            self._num_taken += 1
            self._born_s.pop(block, None)
            if self._num_taken % self._every == 0:
                now = self._born_s[block] = self._clock()
                self._uses_s[block] = deque((now,), maxlen=MAX_USES)

    def used(self, blocks: Iterable[BlockId]) -> None:
        for block in blocks:
            if block in self._born_s:
                self._uses_s[block].append(self._clock())

    def evicted(self, block: BlockId) -> None:
        born_s = self._born_s.pop(block, None)
        if born_s is not None:
            now, uses = self._clock(), list(self._uses_s[block])
            gaps = [later - earlier for earlier, later in pairwise(uses)]
            self._ended.append(BlockLife(lifetime_s=now - born_s, idle_s=now - uses[-1], reuse_gaps_s=gaps))

    def take_ended(self) -> list[BlockLife]:
        ended, self._ended = self._ended, []
        return ended


class FollowedBlockPool(BlockPool):
    """A pool that tells `lives` what becomes of its blocks."""

    def __init__(
        self, num_blocks: int, *, lives: BlockLives, evicted: Evicted | None = None, deltas: KVDeltas | None = None
    ) -> None:
        super().__init__(num_blocks, evicted=evicted, deltas=deltas)
        self.lives = lives

    def take(self, count: int) -> list[BlockId]:
        blocks = super().take(count)
        self.lives.taken(blocks)
        return blocks

    def _evict(self, block: BlockId) -> None:
        self.lives.evicted(block)
        super()._evict(block)
