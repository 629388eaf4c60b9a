"""Selects the sequences to preempt when blocks run out, and decides between swapping and recomputing.

Only sequences after the one that needs blocks are preempted, the latest first, and only if that frees blocks now.
Forked siblings share blocks: preempting one may free none, while preempting all of them does. `victims_for` therefore
counts down the references of each block.
"""

import heapq
from operator import attrgetter

from octavo_engine.core.kv import KVCache
from octavo_engine.core.sequence import Sequence
from octavo_engine.core.tenants import Tenant, Tenants
from octavo_engine.settings.records import PreemptionMode
from octavo_engine.wire.plan import BlockId, StepCosts


def victims_for(seq: Sequence, later: list[Sequence], *, shortfall: int, kv: KVCache) -> list[Sequence] | None:
    """Return the fewest of the latest sequences that free `shortfall` blocks; None if all of `later` do not suffice."""
    refs, written = kv.pool.refs, kv.shared_write_block(seq)
    copies_hashed = written is not None and kv.pool.hashes[written] is not None
    left: dict[BlockId, int] = {}
    for count, victim in enumerate(reversed(later), start=1):
        for block in victim.table:
            left[block] = left.get(block, refs[block]) - 1
            shortfall -= left[block] == 0
            if block == written and not copies_hashed:
                shortfall -= kv.holders(block) - refs[block] + left[block] == 1  # the writer is its last holder
        if shortfall <= 0:
            walked = later[: -count - 1 : -1]
            return [v for v in walked if any(left[block] == 0 or block == written for block in v.table)]
    return None


def victims_of_tenants(
    head: Sequence, running: list[Sequence], *, places: int, blocks: int, lead: float, tenants: Tenants, kv: KVCache
) -> list[Sequence]:
    """Return sequences of other tenants that free `places` and `blocks` for a waiting one; none if that is impossible.

    `lead`: how far a tenant's counter must be ahead of a taker that has a place already. Such a taker gets no more than
    its share, from tenants that hold more than it then does.
    """
    taker, own = head.group.tenant, -(-len(head.token_ids) // kv.block_size)
    floor = 0.0
    if taker.num_running:
        part = tenants.part(taker, places=len(head.indices), blocks=own)
        if part > tenants.share(taker):
            return []
        floor = part / taker.weight
    givers = [t for t in tenants.active.values() if t is not taker and (not floor or t.counter >= taker.counter + lead)]
    order = _order_of_giving(head, running, givers, floor=floor, tenants=tenants) if givers else []
    victims = victims_for(head, order[::-1], shortfall=blocks, kv=kv) if blocks > 0 else []
    if victims is None:
        return []
    places -= sum(len(seq.indices) for seq in victims)
    for seq in order:
        if places > 0 and seq not in victims:
            victims.append(seq)
            places -= len(seq.indices)
    return victims if places <= 0 else []


def _order_of_giving(
    head: Sequence, running: list[Sequence], givers: list[Tenant], *, floor: float, tenants: Tenants
) -> list[Sequence]:
    """Order sequences of `givers`: always the latest of the tenant that then holds most for its weight, above `floor`.

    Each tenant keeps its first sequence, and none gives to a worse priority.
    """
    offered: dict[Tenant, list[Sequence]] = {tenant: [] for tenant in givers}
    for seq in sorted(running, key=attrgetter("key")):
        tenant = seq.group.tenant
        if tenant in offered and tenant.first is not seq and seq.key[0] >= head.key[0]:
            offered[tenant].append(seq)
    order: list[Sequence] = []
    heap = [(-tenants.part(tenant) / tenant.weight, tenant.name, tenant, 0, 0) for tenant in givers if offered[tenant]]
    heapq.heapify(heap)
    while heap and -heap[0][0] > floor:
        _, name, tenant, places, blocks = heapq.heappop(heap)
        order.append(seq := offered[tenant].pop())
        places, blocks = places - len(seq.indices), blocks - seq.num_own_blocks(tenants.block_size)
        if offered[tenant]:
            part = tenants.part(tenant, places=places, blocks=blocks)
            heapq.heappush(heap, (-part / tenant.weight, name, tenant, places, blocks))
    return order


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
