"""`KVCache`: assigns blocks to sequences and lists the copies that must run before the forward pass.

Eviction has three stages: a block evicted from the device moves to the host tier (if there is one), the host tier drops
its least recently used block, and dropped blocks are computed again. On admission a sequence reuses the longest
contiguous prefix found by device hash, by host hash and among its own saved blocks; the rest gets fresh blocks.

Rules that make a step's order (swap out, swap in, copy, forward) correct:
- A sequence writes to a block only if it alone holds the block and `find` cannot return it; else it writes to a copy.
- The source of such a copy keeps the writer's reference until the end of the step (`_held`), so it is not overwritten.
- A block that this step's forward pass fills (`_filled`) may be read by that pass but not copied: copies run before it.
"""

from dataclasses import dataclass, field

from octavo_engine.core.block_metrics import BlockLifeSampler, InstrumentedBlockPool
from octavo_engine.core.blocks import BlockPool
from octavo_engine.core.events import KVDeltas
from octavo_engine.core.host import HostSlot, HostTier
from octavo_engine.core.sequence import Sequence
from octavo_engine.settings.records import SchedulerConfig
from octavo_engine.wire.hashing import block_hashes, image_extra, next_hash
from octavo_engine.wire.plan import BlockId, StepPlan


@dataclass(slots=True)
class Hit:
    """A cached prefix that `lookup` pinned. `blocks[i]` is None if the block is on the host; `loads` has its slot."""

    blocks: list[BlockId | None] = field(default_factory=list)
    loads: list[tuple[int, HostSlot]] = field(default_factory=list)
    num_hashed: int = 0  # leading positions found by hash; later positions are the sequence's own saved blocks
    tokens: int = 0
    rewrites_last: bool = False  # the last token of the last block is computed again to get its logits

    @property
    def on_device(self) -> list[BlockId]:
        return [block for block in self.blocks if block is not None]


class KVCache:
    def __init__(self, config: SchedulerConfig, deltas: KVDeltas, lives: BlockLifeSampler | None = None) -> None:
        self.block_size = config.block_size
        self.caching = config.enable_prefix_caching
        self.host = HostTier(config.num_host_blocks, deltas=deltas) if config.num_host_blocks else None
        spill = self._spill if self.host else None
        self.lives = lives
        self._deltas = deltas
        self.pool = (
            BlockPool(config.num_blocks, evicted=spill, deltas=deltas)
            if lives is None
            else InstrumentedBlockPool(config.num_blocks, evicted=spill, deltas=deltas, lives=lives)
        )
        self.num_swapped_out = self.num_swapped_in = self.num_copies = 0
        self._watermark = int(config.watermark * config.num_blocks)
        self._plan = StepPlan(step_id=-1)
        self._held: dict[BlockId, int] = {}
        self._filled = [-1] * config.num_blocks

    @property
    def num_dropped(self) -> int:
        return self.host.num_dropped if self.host else self.pool.num_evicted

    def begin_step(self, plan: StepPlan) -> None:
        self._plan = plan
        if self.host:
            self.host.begin_step(plan.step_id)

    def end_step(self) -> None:
        for block, count in self._held.items():
            self.pool.release([block] * count)
        self._held.clear()

    def lookup(self, seq: Sequence) -> Hit:
        """Return the longest cached prefix of `seq`, whose blocks stay pinned until `admit` or `cancel`."""
        hit, size, limit = Hit(), self.block_size, self._readable_tokens(seq)
        self._hash_full_blocks(seq, len(seq.token_ids) // size)
        hit.blocks += self.pool.share_prefix(seq.hashes[: limit // size])
        hit.num_hashed = len(hit.blocks)
        hit.tokens = hit.num_hashed * size
        while hit.tokens == len(hit.blocks) * size and self._find_next(seq, hit, limit):
            pass
        self._use_tail_first(seq.hashes[len(hit.on_device) : hit.num_hashed])
        if hit.tokens == len(seq.token_ids):
            self._leave_one_token(hit)
        return hit

    def touch(self, seq: Sequence) -> int:
        """Mark the cached blocks of a newly queued request as recently used, in both tiers, to evict them later.

        Return the number of their tokens, if the request has images.
        """
        limit = self._readable_tokens(seq) // self.block_size
        on_host = self.host.num_used if self.host else 0
        if not limit or not (self.pool.num_cached or on_host or seq.group.request.images):
            return 0
        self._hash_full_blocks(seq, limit)
        blocks = self.pool.share_prefix(seq.hashes[:limit])
        self.pool.release(blocks, spill=None)
        count = len(blocks)
        while self.host and count < min(limit, len(seq.hashes)) and self.host.find(seq.hashes[count]) is not None:
            count += 1
        self._use_tail_first(seq.hashes[len(blocks) : count])
        return count * self.block_size

    def cancel(self, hit: Hit) -> None:
        self.pool.release(hit.on_device, spill=None)

    def admit(self, seq: Sequence, hit: Hit, *, alone: bool) -> bool:
        """Allocate blocks for all tokens of `seq`; return False and allocate none if they do not fit.

        `hit` must not be used afterwards. `alone`: no other sequence runs, so no blocks need to be kept in reserve.
        """
        on_device = hit.on_device
        copies_last = hit.rewrites_last and hit.blocks[-1] is not None
        num_fresh = self._num_fresh(seq, hit)
        if self.shortfall(seq, hit, alone=alone) > 0:
            self.cancel(hit)
            return False
        if self.lives is not None:
            self.lives.record_use(on_device)
        fresh = self.pool.allocate(num_fresh)
        seq.table = [fresh.pop() if block is None else block for block in hit.blocks]
        for position, slot in hit.loads:
            self._plan.swap_in.append((slot, seq.table[position]))
        self.num_swapped_in += len(hit.loads)
        seq.num_registered = hit.num_hashed - hit.rewrites_last
        for position, _ in hit.loads:
            if position < seq.num_registered:
                self._register(seq, position)
        if copies_last:
            self._replace(seq, len(seq.table) - 1, fresh.pop())
        seq.table += fresh
        seq.computed = hit.tokens
        self.forget_private(seq)
        return True

    def shortfall(self, seq: Sequence, hit: Hit, *, alone: bool) -> int:
        """Return how many blocks are missing to admit `seq`; 0 or less if none."""
        # In the next step, each forked sibling needs a tail block of its own.
        spare = 0 if alone else self._watermark + len(seq.indices) - 1
        return self._num_fresh(seq, hit) + spare - self.pool.num_available

    def share_computed(self, seq: Sequence) -> int:
        """Let a running prompt reuse blocks that other prompts have computed, or will compute, since it was admitted.

        Prompts with a common prefix thus compute each block once. At least one token remains to be computed. Returns
        the increase of `seq.computed`, in tokens.
        """
        first, limit = seq.computed // self.block_size, (len(seq.token_ids) - 1) // self.block_size
        if not (self.caching and seq.params.reads_prefix_cache and seq.num_registered == first < limit):
            return 0
        self._hash_full_blocks(seq, limit)
        written = (self._plan.copies, self._plan.swap_in)  # a block that they write can't be released in this step
        if self.pool.find(seq.hashes[first]) is None or any(p[1] == seq.table[first] for ps in written for p in ps):
            return 0
        shared = self.pool.share_prefix(seq.hashes[first:limit])
        end = first + len(shared)
        self.pool.release(seq.table[first:end])
        seq.table[first:end] = shared
        seq.num_registered, seq.num_sent = end, min(seq.num_sent, first)
        gained, seq.computed = end * self.block_size - seq.computed, end * self.block_size
        return gained

    def blocks_needed(self, seq: Sequence, end: int) -> int:
        """Return how many fresh blocks are needed to write tokens [seq.computed, end)."""
        fresh = -(-end // self.block_size) - len(seq.table)
        return max(fresh, 0) + (self.shared_write_block(seq) is not None)

    def shared_write_block(self, seq: Sequence) -> BlockId | None:
        """Return the block that the next token is written to, if it must be copied first; otherwise None."""
        position = seq.computed // self.block_size
        if position >= len(seq.table):
            return None
        block = seq.table[position]
        holders = self.pool.refs[block] - self._held.get(block, 0)
        return block if holders > 1 or self.pool.hashes[block] is not None else None

    def holders(self, block: BlockId) -> int:
        return self.pool.refs[block] - self._held.get(block, 0)

    def grow(self, seq: Sequence, end: int) -> None:
        """Allocate or copy the blocks to write tokens [seq.computed, end) to; the caller checks `blocks_needed`."""
        if self.shared_write_block(seq) is not None:
            self._replace(seq, seq.computed // self.block_size, self.pool.allocate(1)[0])
        missing = -(-end // self.block_size) - len(seq.table)
        if missing > 0:
            seq.table += self.pool.allocate(missing)

    def register_full(self, seq: Sequence, num_tokens: int) -> None:
        """Register the hashes of the full blocks of tokens [0, num_tokens), whose KV exists at the end of this step."""
        num_full = num_tokens // self.block_size
        if not self.caching or num_full <= seq.num_registered:
            return
        self._hash_full_blocks(seq, num_full)
        for position in range(seq.num_registered, num_full):
            self._register(seq, position)
            self._filled[seq.table[position]] = self._plan.step_id
        seq.num_registered = num_full

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Share the parent's blocks of the child's computed tokens, including a partly filled last block."""
        child.table = parent.table[: -(-child.computed // self.block_size)]
        child.num_registered = min(parent.num_registered, len(child.table))
        self.pool.share(child.table)

    def release(self, seq: Sequence, *, spill: bool = True) -> None:
        self.pool.release(seq.table, spill=spill)
        self._clear_table(seq)
        self.forget_private(seq)

    def unregister_exclusive_blocks(self, seq: Sequence) -> None:
        """Unregister the blocks that only this sequence holds, because their content may be wrong."""
        for block in seq.table[: seq.num_registered]:
            if self.pool.refs[block] == 1:
                self.pool.unregister(block)

    def swap_out(self, seq: Sequence) -> None:
        """Release the blocks but keep their content: blocks with a hash are saved when evicted, all others now."""
        assert self.host is not None
        first, last = seq.num_registered, -(-seq.computed // self.block_size)
        seq.private_blocks = range(first, last)
        for position in reversed(seq.private_blocks):
            slot = self.host.put((seq.seq_id, position))
            if slot is not None:
                self._plan.swap_out.append((seq.table[position], slot))
                self.num_swapped_out += 1
        self.pool.release(seq.table)
        self._clear_table(seq)

    def forget_private(self, seq: Sequence) -> None:
        for position in seq.private_blocks:
            assert self.host is not None
            self.host.discard((seq.seq_id, position))
        seq.private_blocks = range(0)

    def forget_contents(self) -> None:
        """Drop all hashes and host entries, because their content may be wrong or must not be reused."""
        self.pool.forget_hashes()
        if self.host:
            self.host.forget_all()

    def check(self, live: list[Sequence]) -> None:
        self.pool.check()
        expected = [0] * self.pool.num_blocks
        for seq in live:
            for position, block in enumerate(seq.table):
                expected[block] += 1
                known = self.pool.hashes[block]
                if position < seq.num_registered:
                    assert known == seq.hashes[position], f"block {block} holds something else"
                else:  # a block with a hash is copied before it is written
                    assert known is None or position == seq.computed // self.block_size, f"block {block}"
        assert expected == self.pool.refs, "references and tables differ"
        if self.host:
            self.host.check()
            owned = {(seq.seq_id, position) for seq in live for position in seq.private_blocks}
            assert owned.issuperset(self.host.private_keys()), "a saved block without a sequence"

    def _num_fresh(self, seq: Sequence, hit: Hit) -> int:
        copies_last = hit.rewrites_last and hit.blocks[-1] is not None
        return -(-len(seq.token_ids) // self.block_size) - len(hit.on_device) + copies_last

    def _readable_tokens(self, seq: Sequence) -> int:
        """Return how many leading tokens `seq` may read from the cache.

        A request that does not read the prefix cache may still read the KV that it had computed before a preemption,
        except if it pools the rows of all its tokens.
        """
        if seq.params.reads_prefix_cache:
            return len(seq.token_ids)
        if seq.pooling is not None:
            return 0
        if seq.prompt_logprobs is not None:
            return min(seq.saved, len(seq.prompt_logprobs) - 1)
        return seq.saved

    def _find_next(self, seq: Sequence, hit: Hit, limit: int) -> bool:
        """Extend `hit` by one block of the host tier, after the device's blocks; return False if there is none.

        The device has no later block of the prefix: it evicts tails before heads.
        """
        if self.host is None:
            return False
        position, slot = len(hit.blocks), None
        end = hit.tokens + self.block_size
        if position < len(seq.hashes) and end <= limit:
            slot = self.host.find(seq.hashes[position])
            hit.num_hashed += slot is not None
        if slot is None and position in seq.private_blocks and min(end, seq.saved) <= limit:
            end = min(end, seq.saved)
            slot = self.host.find((seq.seq_id, position))
        if slot is None:
            return False
        hit.loads.append((position, slot))
        hit.blocks.append(None)
        hit.tokens = end
        return True

    def _use_tail_first(self, on_host: list[bytes]) -> None:
        """Mark a prefix's host blocks as used, last block first, so that a full tier evicts ends of prefixes first."""
        if self.host:
            for block_hash in reversed(on_host):
                self.host.find(block_hash)

    def _leave_one_token(self, hit: Hit) -> None:
        """Shorten a hit on all tokens: to get its logits, the last token is computed again, in a copy of its block.

        Without room for the copy, which only a prompt as long as the whole cache needs, the last block is left out.
        """
        last = hit.blocks[-1]
        if last is None or (self._filled[last] != self._plan.step_id and self.pool.num_available):
            hit.tokens -= 1
            hit.rewrites_last = True
            return
        self.pool.release([last])
        hit.blocks.pop()
        hit.num_hashed -= 1
        hit.tokens -= self.block_size

    def _register(self, seq: Sequence, position: int) -> None:
        block_hash = seq.hashes[position]
        if self._deltas.with_tokens:
            self._deltas.describe(block_hash, position, self.block_size, seq)
        self.pool.register(seq.table[position], block_hash)

    def _replace(self, seq: Sequence, position: int, fresh: BlockId) -> None:
        source = seq.table[position]
        self._plan.copies.append((source, fresh))
        self._held[source] = self._held.get(source, 0) + 1
        self.num_copies += 1
        seq.table[position] = fresh
        seq.num_sent = min(seq.num_sent, position)
        seq.num_registered = min(seq.num_registered, position)

    def _hash_full_blocks(self, seq: Sequence, count: int) -> None:
        hashes, size = seq.hashes, self.block_size
        if not self.caching or count <= len(hashes):
            return
        images = [(image.start, image.end, image.digest) for image in seq.group.request.images]
        if not hashes and not images:
            hashes += block_hashes(seq.root_hash, seq.token_ids[: count * size], size)
        for position in range(len(hashes), count):
            first, end = position * size, (position + 1) * size
            prev = hashes[-1] if hashes else seq.root_hash
            hashes.append(next_hash(prev, seq.token_ids[first:end], image_extra(images, first, end)))

    def _clear_table(self, seq: Sequence) -> None:
        seq.table = []
        seq.computed = seq.num_registered = seq.num_sent = 0

    def _spill(self, block: BlockId, block_hash: bytes) -> None:
        assert self.host is not None
        if self.host.find(block_hash) is None:
            slot = self.host.put(block_hash)
            if slot is not None:
                self._plan.swap_out.append((block, slot))
                self.num_swapped_out += 1
