"""`Tenants`: the service that each tenant got, its queue, and what it holds.

A tenant is the name of an API key. Its *counter* is a virtual time: for each sequence of each step, one and the number
of computed tokens (so a generated token costs 2), divided by the tenant's weight. The tenant with the least counter is
served first. A tenant that comes back is lifted to the least counter of those with work: idle time earns no credit,
while the surplus of a tenant that got more than others is kept.

A tenant is active while it has a sequence that is not deferred. While only one is active, nothing here costs more than
an addition per step.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from heapq import heapify
from typing import TYPE_CHECKING

from octavo_engine.settings.records import SchedulerConfig
from octavo_engine.wire.plan import SeqId, SeqStep

if TYPE_CHECKING:
    from octavo_engine.core.sequence import Key, Sequence

MAX_IDLE = 1024  # remembered tenants without work whose counter is ahead of the others'
Head = tuple[int, float, "Key", "Tenant"]


@dataclass(slots=True, eq=False)
class Tenant:
    """`num_running` to `first` describe the running sequences; they are only valid while tenants compete."""

    name: str
    weight: float = 1.0
    counter: float = 0.0
    num_seqs: int = 0  # unfinished sequences, without deferred ones
    waiting: list["Sequence"] = field(default_factory=list)  # in reverse order of service
    num_running: int = 0
    num_places: int = 0
    num_blocks: int = 0  # without those that it reads from the cache
    num_prompt_tokens: int = 0  # to compute before its running sequences sample their next token
    first: "Sequence | None" = None

    def hold(self, seq: "Sequence", block_size: int) -> None:
        """Count a running sequence."""
        self.num_running += 1
        self.num_places += len(seq.indices)
        self.num_blocks += seq.num_own_blocks(block_size)
        todo = seq.length - seq.computed
        if todo > 1:
            self.num_prompt_tokens += todo
        if self.first is None or seq.key < self.first.key:
            self.first = seq

    def release_all(self) -> None:
        self.num_running = self.num_places = self.num_blocks = self.num_prompt_tokens = 0
        self.first = None


class Tenants:
    def __init__(self, config: SchedulerConfig) -> None:
        self.active: dict[str, Tenant] = {}
        self._idle: dict[str, Tenant] = {}  # the longest idle first
        self._least = 0.0  # the least counter when a tenant last became idle
        self.num_growing = 0  # running sequences that need a block for their next token
        self.block_size = config.block_size
        self._max_places = config.max_num_seqs
        self._max_blocks = config.num_blocks

    @property
    def compete(self) -> bool:
        return len(self.active) > 1

    def enter(self, name: str, weight: float) -> Tenant:
        """Count one more sequence of a tenant, and return the tenant."""
        tenant = self.active.get(name)
        if tenant is None:
            tenant = self._idle.pop(name, None) or Tenant(name)
            tenant.counter = max(tenant.counter, self._least_counter())
            self.active[name] = tenant
        tenant.weight = weight
        tenant.num_seqs += 1
        return tenant

    def leave(self, tenant: Tenant) -> None:
        tenant.num_seqs -= 1
        if tenant.num_seqs:
            return
        self._least = self._least_counter()
        del self.active[tenant.name]
        if tenant.counter > self._least:
            self._idle[tenant.name] = tenant
            if len(self._idle) > MAX_IDLE:
                del self._idle[next(iter(self._idle))]

    def charge(self, steps: list[SeqStep], seqs: dict[SeqId, "Sequence"], num_tokens: int) -> None:
        """Add the cost of a step; `num_tokens`: the tokens that it computes."""
        if self.compete:
            for step in steps:
                tenant = seqs[step.seq_id].group.tenant
                tenant.counter += (1 + step.num_computed) / tenant.weight
        elif steps:
            (tenant,) = self.active.values()
            tenant.counter += (len(steps) + num_tokens) / tenant.weight

    def heads(self) -> list[Head]:
        """Return the first waiting sequence of each tenant as a heap: by priority, then by the tenant's counter."""
        heads = [head_of(tenant) for tenant in self.active.values() if tenant.waiting]
        heapify(heads)
        return heads

    def measure(self, running: Iterable["Sequence"]) -> None:
        """Count what each tenant holds."""
        self.num_growing = 0
        for tenant in self.active.values():
            tenant.release_all()
        for seq in running:
            seq.group.tenant.hold(seq, self.block_size)
            self.num_growing += seq.computed == len(seq.table) * self.block_size

    def share(self, tenant: Tenant) -> float:
        """Return the part of all places, and of all blocks, that the tenant may hold while all compete."""
        return tenant.weight / sum(other.weight for other in self.active.values())

    def places_left(self, tenant: Tenant) -> int:
        """Return the places that the tenant lacks of its share, at least one of them if it has none."""
        return max(int(self.share(tenant) * self._max_places), 1) - tenant.num_places

    def part(self, tenant: Tenant, *, places: int = 0, blocks: int = 0) -> float:
        """Return the larger of the tenant's parts of all places and all blocks, with some more or less of them."""
        num_places, num_blocks = tenant.num_places + places, tenant.num_blocks + blocks
        return max(num_places / self._max_places, num_blocks / self._max_blocks)

    def _least_counter(self) -> float:
        return min([tenant.counter for tenant in self.active.values()], default=self._least)


def head_of(tenant: Tenant) -> Head:
    key = tenant.waiting[-1].key
    return key[0], tenant.counter, key, tenant
