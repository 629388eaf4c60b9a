"""Selects the sequences to preempt when blocks run out, and decides between swapping and recomputing.

Only sequences after the one that needs blocks are preempted, the latest first, and only if that frees blocks now.
Forked siblings share blocks: preempting one may free none, while preempting all of them does. `victims_for` therefore
counts down the references of each block.
"""

from octavo_engine.core.kv import KVCache
from octavo_engine.core.sequence import Sequence
from octavo_engine.settings.records import PreemptionMode
from octavo_engine.wire.plan import BlockId, StepCosts


def victims_for(
    seq: Sequence, later: list[Sequence], *, shortfall: int, kv: KVCache, places: int = 0
) -> list[Sequence] | None:
    """Return the fewest of the latest sequences that free `shortfall` blocks and `places`; None: all do not suffice."""
    refs, written = kv.pool.refs, kv.shared_write_block(seq)
    copies_hashed = written is not None and kv.pool.hashes[written] is not None
    left: dict[BlockId, int] = {}
    places_left = places
    for count, victim in enumerate(reversed(later), start=1):
        places_left -= len(victim.indices)
        for block in victim.table:
            left[block] = left.get(block, refs[block]) - 1
            shortfall -= left[block] == 0
            if block == written and not copies_hashed:
                shortfall -= kv.holders(block) - refs[block] + left[block] == 1  # the writer is its last holder
        if shortfall <= 0 and places_left <= 0:
            walked = later[: -count - 1 : -1]
            return [v for v in walked if places > 0 or any(left[b] == 0 or b == written for b in v.table)]
    return None


def prefers_swap(seq: Sequence, *, mode: PreemptionMode, costs: StepCosts, kv: KVCache) -> bool:
    """Return True if swapping the victim's own blocks out and in costs no more than computing their tokens again, or if
    a cost is not measured yet: swapping measures the cost of a swap.
    """
    if kv.host is None or mode == "recompute" or not seq.computed:
        return False
    if mode == "swap" or not costs.swap_block_s or not costs.prefill_token_s:
        return True
    num_computed_blocks = -(-seq.computed // kv.block_size)
    own_blocks = sum(kv.pool.refs[block] == 1 for block in seq.table[:num_computed_blocks])
    own_tokens = min(own_blocks * kv.block_size, seq.computed)
    return 2 * own_blocks * costs.swap_block_s <= costs.chunk_s(seq.computed - own_tokens, own_tokens)
