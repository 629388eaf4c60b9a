"""`BlockPool`: the only owner of device blocks and of their reference counts.

A block is in use (refs > 0), cached (refs == 0, but `find` still returns it by its hash) or free. Law: free + cached +
in_use == total. Transitions: free or cached -allocate-> in use; cached -share-> in use; in use -release-> cached if the
block has a hash, else free. `register` gives a hash to a block in use; the block loses it when it is allocated again:
eviction is lazy and costs nothing while blocks suffice.

Free and cached blocks form one list, least recently used first, linked through two arrays of ints (position
`num_blocks` is its head and tail), so that a cached block is removed from the middle in O(1). Blocks without a hash are
put at the front: no cached block is evicted while there is a free one.
"""

from collections.abc import Callable, Iterable, Iterator

from octavo_engine.core.events import KVDeltas
from octavo_engine.wire.plan import BlockId

Evicted = Callable[[BlockId, bytes], None]


class BlockPool:
    """`evicted(block, hash)` is called before a cached block is evicted that was released with `spill`."""

    def __init__(self, num_blocks: int, *, evicted: Evicted | None = None, deltas: KVDeltas | None = None) -> None:
        self.num_blocks = num_blocks
        self.num_available = num_blocks  # free + cached
        self.num_cached = 0
        self.num_evicted = 0
        self.refs = [0] * num_blocks
        self.hashes: list[bytes | None] = [None] * num_blocks
        self._evicted = evicted
        self._deltas = deltas or KVDeltas(enabled=False)
        self._spill = bytearray(num_blocks)
        self._by_hash: dict[bytes, BlockId] = {}
        self._duplicates: dict[bytes, list[BlockId]] = {}  # further blocks with the same hash
        self._next = [*range(1, num_blocks + 1), 0]
        self._prev = [num_blocks, *range(num_blocks)]

    @property
    def num_free(self) -> int:
        return self.num_available - self.num_cached

    @property
    def num_in_use(self) -> int:
        return self.num_blocks - self.num_available

    def find(self, block_hash: bytes) -> BlockId | None:
        return self._by_hash.get(block_hash)

    def cached_hashes(self) -> Iterator[bytes]:
        """Iterate over the registered hashes, each once, including those of blocks in use."""
        return iter(self._by_hash)

    def allocate(self, count: int) -> list[BlockId]:
        """Return `count` blocks with one reference each, evicting the least recently used cached blocks.

        The caller checks `num_available` before.
        """
        assert count <= self.num_available, f"allocate({count}) of {self.num_available}"
        taken = []
        for _ in range(count):
            block = self._next[self.num_blocks]
            self._unlink(block)
            if self.hashes[block] is not None:
                self._evict(block)
            self.refs[block] = 1
            taken.append(block)
        return taken

    def share(self, blocks: Iterable[BlockId]) -> None:
        """Add one reference to each block; a cached block is then in use again."""
        refs = self.refs
        for block in blocks:
            if refs[block] == 0:
                assert self.hashes[block] is not None, f"block {block} is free"
                self._unlink(block)
                self.num_cached -= 1
            refs[block] += 1

    def share_prefix(self, hashes: list[bytes]) -> list[BlockId]:
        """Add a reference to each block of the longest prefix of `hashes` that is registered; return the blocks."""
        blocks = []
        for block_hash in hashes:
            block = self._by_hash.get(block_hash)
            if block is None:
                break
            blocks.append(block)
        self.share(blocks)
        return blocks

    def release(self, blocks: list[BlockId], *, spill: bool | None = True) -> None:
        """Remove one reference from each block, the last block first, so that the head of a prefix is evicted last.

        `spill`: whether a later eviction copies the content to the host tier; None keeps the block's present setting.
        """
        refs = self.refs
        for block in reversed(blocks):
            assert refs[block] > 0, f"block {block} released twice"
            refs[block] -= 1
            if refs[block] == 0:
                self._spill[block] = self._spill[block] if spill is None else spill
                if self.hashes[block] is None:
                    self._link(self.num_blocks, block)
                else:
                    self.num_cached += 1
                    self._link(self._prev[self.num_blocks], block)

    def register(self, block: BlockId, block_hash: bytes) -> None:
        """Give a hash to a block in use: from now on `find(block_hash)` may return it."""
        assert self.refs[block] > 0, f"block {block} is not in use"
        assert self.hashes[block] is None, f"block {block} has a hash"
        self.hashes[block] = block_hash
        if self._by_hash.setdefault(block_hash, block) != block:
            self._duplicates.setdefault(block_hash, []).append(block)
        else:
            self._deltas.stored("device", block_hash)

    def unregister(self, block: BlockId) -> None:
        """Remove the hash of a block in use, because its content is wrong."""
        block_hash = self.hashes[block]
        assert block_hash is not None, f"block {block} has no hash"
        assert self.refs[block] > 0, f"block {block} is not in use"
        self.hashes[block] = None
        self._remove_hash(block, block_hash)

    def forget_hashes(self) -> None:
        """Remove all hashes; blocks in use stay in use."""
        for block_hash in self._by_hash:
            self._deltas.removed("device", block_hash)
        self._by_hash.clear()
        self._duplicates.clear()
        self.hashes = [None] * self.num_blocks
        self.num_cached = 0

    def check(self) -> None:
        listed = []
        block = self._next[self.num_blocks]
        while block != self.num_blocks:
            listed.append(block)
            assert self._prev[self._next[block]] == block, f"broken links at {block}"
            block = self._next[block]
        assert len(listed) == len(set(listed)) == self.num_available
        assert sorted(listed) == [b for b, n in enumerate(self.refs) if n == 0]
        assert self.num_cached == sum(self.hashes[b] is not None for b in listed)
        assert self.num_free + self.num_cached + self.num_in_use == self.num_blocks
        assert all(n >= 0 for n in self.refs)
        known = sorted([*self._by_hash.values(), *(b for more in self._duplicates.values() for b in more)])
        assert known == [b for b, h in enumerate(self.hashes) if h is not None]
        assert all(self.hashes[b] == h for h, b in self._by_hash.items())
        assert all(more and all(self.hashes[b] == h for b in more) for h, more in self._duplicates.items())

    def _evict(self, block: BlockId) -> None:
        block_hash = self.hashes[block]
        assert block_hash is not None
        self.num_cached -= 1
        self.num_evicted += 1
        if self._evicted is not None and self._spill[block]:
            self._evicted(block, block_hash)
        self.hashes[block] = None
        self._remove_hash(block, block_hash)

    def _remove_hash(self, block: BlockId, block_hash: bytes) -> None:
        others = self._duplicates.get(block_hash)
        if others is None:
            del self._by_hash[block_hash]
            self._deltas.removed("device", block_hash)
            return
        if self._by_hash[block_hash] == block:
            self._by_hash[block_hash] = others.pop()
        else:
            others.remove(block)
        if not others:
            del self._duplicates[block_hash]

    def _unlink(self, block: BlockId) -> None:
        before, after = self._prev[block], self._next[block]
        self._next[before], self._prev[after] = after, before
        self.num_available -= 1

    def _link(self, before: BlockId, block: BlockId) -> None:
        after = self._next[before]
        self._prev[block], self._next[block] = before, after
        self._next[before] = self._prev[after] = block
        self.num_available += 1
