"""`Tenants`: how much service each tenant has had, its queue, and the places and blocks that it uses.

A tenant is the name of an API key. Its *counter* is a virtual time: for each sequence, a step adds (1 + computed
tokens) / the tenant's weight, so a generated token costs 2. The tenant with the lowest counter is served first. The
counter of a tenant that returns is raised to the lowest counter of active tenants, so that idle time earns no credit; a
higher counter stays.

A tenant is active while it has a sequence that is not deferred. If only one is active, fairness costs one addition per
step.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from octavo_engine.settings.records import SchedulerConfig
from octavo_engine.wire.plan import SeqId, SeqStep
from octavo_engine.wire.records import TenantUsage

if TYPE_CHECKING:
    from octavo_engine.core.sequence import Key, Sequence

MAX_IDLE = 1024  # tenants without work that are remembered: their counters are ahead of the others'


@dataclass(slots=True, eq=False)
class Tenant:
    """`num_places` to `first` describe the running sequences; they are only valid while tenants compete."""

    name: str
    weight: float = 1.0
    counter: float = 0.0
    num_seqs: int = 0  # unfinished sequences, without deferred ones
    waiting: list["Sequence"] = field(default_factory=list)  # last in service first
    num_places: int = 0
    num_blocks: int = 0  # blocks of running sequences, without those found in the cache
    num_prompt_tokens: int = 0  # prompt tokens that running sequences still have to compute
    first: "Sequence | None" = None

    @property
    def head(self) -> "tuple[int, float, Key, Tenant]":
        """The sort key of its first waiting sequence among all tenants' first ones."""
        key = self.waiting[-1].key
        return key[0], self.counter, key, self

    def hold(self, seq: "Sequence", block_size: int) -> None:
        """Count a running sequence."""
        self.num_places += len(seq.indices)
        self.num_blocks += seq.num_own_blocks(block_size)
        if (todo := seq.length - seq.computed) > 1:
            self.num_prompt_tokens += todo
        if self.first is None or seq.key < self.first.key:
            self.first = seq


class Tenants:
    def __init__(self, config: SchedulerConfig) -> None:
        self.active: dict[str, Tenant] = {}
        self.usage = defaultdict[str, TenantUsage](TenantUsage)  # by tenant's name, since the last `take_usage`
        self.num_growing = 0  # number of running sequences that need a block for their next token
        self._config = config
        self._idle: dict[str, Tenant] = {}  # the longest idle first
        self._least = 0.0  # the least counter when a tenant last became idle

    @property
    def compete(self) -> bool:
        return len(self.active) > 1

    def enter(self, name: str, weight: float) -> Tenant:
        """Count one more sequence of a tenant, and return the tenant."""
        tenant = self.active.get(name)
        if tenant is None:
            tenant = self._idle.pop(name, None) or Tenant(name)
            tenant.counter = max(tenant.counter, min([t.counter for t in self.active.values()], default=self._least))
            self.active[name] = tenant
        tenant.weight = weight
        tenant.num_seqs += 1
        return tenant

    def leave(self, tenant: Tenant) -> None:
        tenant.num_seqs -= 1
        if tenant.num_seqs:
            return
        self._least = min(t.counter for t in self.active.values())
        del self.active[tenant.name]
        if tenant.counter > self._least:
            self._idle[tenant.name] = tenant
            if len(self._idle) > MAX_IDLE:
                del self._idle[next(iter(self._idle))]

    def take_usage(self) -> dict[str, TenantUsage]:
        taken, self.usage = self.usage, defaultdict(TenantUsage)
        return taken

    def charge(self, steps: list[SeqStep], seqs: dict[SeqId, "Sequence"], num_tokens: int) -> None:
        """Add the cost of a step; `num_tokens`: the tokens that it computes."""
        if self.compete:
            for step in steps:
                tenant = seqs[step.seq_id].group.tenant
                tenant.counter += (1 + step.num_computed) / tenant.weight
        elif steps:
            (tenant,) = self.active.values()
            tenant.counter += (len(steps) + num_tokens) / tenant.weight

    def measure(self, running: Iterable["Sequence"]) -> None:
        """Count the places, blocks and prompt tokens of each tenant."""
        size, self.num_growing = self._config.block_size, 0
        for tenant in self.active.values():
            tenant.num_places = tenant.num_blocks = tenant.num_prompt_tokens = 0
            tenant.first = None
        for seq in running:
            seq.group.tenant.hold(seq, size)
            self.num_growing += seq.computed == len(seq.table) * size

    def places_left(self, tenant: Tenant) -> int:
        """Return how many places the tenant lacks to its share of at least one place."""
        return max(int(self._share(tenant) * self._config.max_num_seqs), 1) - tenant.num_places

    def part(self, tenant: Tenant, *, places: int = 0, blocks: int = 0) -> float:
        """Return the tenant's fraction of all places or of all blocks, the larger one, with `places` and `blocks`
        more."""
        config = self._config
        return max((tenant.num_places + places) / config.max_num_seqs, (tenant.num_blocks + blocks) / config.num_blocks)

    def givers(self, head: "Sequence") -> set[Tenant]:
        """Return the tenants whose sequences `head` may preempt: all other tenants if its own runs nothing.

        Otherwise, they are the tenants that are a step ahead and use more, relative to their weight; if `head` would
        take its own tenant above its share, there are none.
        """
        taker, config = head.group.tenant, self._config
        if taker.first is None:
            return {tenant for tenant in self.active.values() if tenant is not taker}
        part = self.part(taker, places=len(head.indices), blocks=len(head.token_ids) // config.block_size)
        if part > self._share(taker):
            return set()
        least, ahead = part / taker.weight, taker.counter + config.max_num_batched_tokens
        return {t for t in self.active.values() if t.counter >= ahead and self.part(t) / t.weight > least}

    def _share(self, tenant: Tenant) -> float:
        return tenant.weight / sum(other.weight for other in self.active.values())
