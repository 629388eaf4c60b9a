"""`SchedulerState`: the state shared by planning and committing: queues, sequences, KV cache and counters.

`running` and each tenant's queue are ordered by key (priority, arrival, index). The last sequence of `running` is thus
scheduled last and preempted first, and a preempted sequence returns to the head of its queue. While tenants compete,
`order_running` moves sequences of tenants that use more to the end. A waiting request with n > 1 is one sequence that
needs n places of `max_num_seqs`: `num_places` counts running sequences and those that they will fork.
"""

import bisect
from operator import attrgetter

from octavo_engine.core.block_metrics import BlockLifeSampler
from octavo_engine.core.encoder_cache import EncoderCache
from octavo_engine.core.events import KVDeltas
from octavo_engine.core.kv import KVCache
from octavo_engine.core.sequence import Key, Sequence, SequenceGroup, forked_sequence
from octavo_engine.core.tenants import Tenants
from octavo_engine.settings.records import SchedulerConfig
from octavo_engine.wire.plan import SeqId, StepPlan
from octavo_engine.wire.records import EngineStats, ErrorInfo, FinishReason, SeqOutput

_key = attrgetter("key")


def _reverse_key(seq: Sequence) -> Key:
    priority, arrival, order, index = seq.key
    return -priority, -arrival, -order, -index


class SchedulerState:
    def __init__(self, config: SchedulerConfig, deltas: KVDeltas) -> None:
        self.config = config
        every = config.block_lives_every
        self.lives = BlockLifeSampler(every, lambda: self.now) if every else None
        self.kv = KVCache(config, deltas, self.lives)
        self.encoder = EncoderCache(config)
        self.groups: dict[str, SequenceGroup] = {}
        self.seqs: dict[SeqId, Sequence] = {}
        self.running: list[Sequence] = []
        self.tenants = Tenants(config)
        self.deferred: dict[SeqId, Sequence] = {}  # wait outside the queues until they are prepared
        self.num_waiting_tokens = 0  # tokens that waiting sequences must compute before they sample
        self.num_places = 0
        self.num_needing_newest = 0  # running sequences with `needs_newest`
        self.in_flight: dict[int, StepPlan] = {}
        self.dropped: list[SeqId] = []  # the next plan lists them for the runner to drop
        self.counters = EngineStats(total_blocks=config.num_blocks, host_total_blocks=config.num_host_blocks)
        self.now = 0.0
        self.unprepared: list[SequenceGroup] = []  # requests that the latest `add` or `step` deferred for images
        self.encoded: list[str] = []  # requests whose last image tokens the latest plan computes
        self.blocked_by = ""  # reason why the latest step did not admit the queue's head
        self._next_seq_id = 0
        self._is_by_key = True  # `running` is ordered by key

    @property
    def steps_ahead(self) -> int:
        """Number of steps that may be planned before the newest tokens are known; 0 while a sequence `needs_newest`."""
        return 0 if self.num_needing_newest else self.config.steps_ahead

    @property
    def waiting(self) -> list[Sequence]:
        """The waiting sequences: tenant by tenant, each tenant's in order of service."""
        return [seq for tenant in self.tenants.active.values() for seq in reversed(tenant.waiting)]

    @property
    def num_waiting(self) -> int:
        return sum([len(tenant.waiting) for tenant in self.tenants.active.values()])

    def new_seq_id(self) -> SeqId:
        self._next_seq_id += 1
        return self._next_seq_id

    def enter(self, seq: Sequence) -> None:
        """Add a sequence that is not deferred. The caller then adds it to a queue or to `running`."""
        request = seq.group.request
        self.seqs[seq.seq_id] = seq
        seq.group.tenant = self.tenants.enter(request.tenant, request.weight)

    def count_prompt(self, num_tokens: int, seq: Sequence) -> None:
        """Count prompt tokens twice, in the total and for the tenant, so that the sum over tenants equals the total."""
        self.counters.prompt_tokens += num_tokens
        self.tenants.usage[seq.group.request.tenant].prompt_tokens += num_tokens

    def count_cached(self, num_tokens: int, seq: Sequence) -> None:
        """Count prompt tokens found in the cache, as `count_prompt` does."""
        self.counters.prefix_cache_hits += num_tokens
        self.tenants.usage[seq.group.request.tenant].cached_tokens += num_tokens

    def count_generated(self, num_tokens: int, seq: Sequence) -> None:
        """Count generated tokens, as `count_prompt` does."""
        self.counters.generation_tokens += num_tokens
        self.tenants.usage[seq.group.request.tenant].generation_tokens += num_tokens

    def order_running(self) -> None:
        """While tenants compete, move each tenant's first sequence to the front; sort others by their tenants' use."""
        if self.tenants.compete:
            held = {tenant: self.tenants.part(tenant) / tenant.weight for tenant in self.tenants.active.values()}
            self.running.sort(
                key=lambda s: (s.key[0], 0.0 if s.group.tenant.first is s else held[s.group.tenant], s.key)
            )
            self._is_by_key = False
        elif not self._is_by_key:
            self.running.sort(key=_key)
            self._is_by_key = True

    def enter_running(self, seq: Sequence) -> None:
        seq.status = "running"
        bisect.insort(self.running, seq, key=_key)
        self.num_places += len(seq.indices)
        self.num_needing_newest += seq.needs_newest
        self.tenants.usage[seq.group.request.tenant].running += 1

    def enter_waiting(self, seq: Sequence) -> None:
        bisect.insort(seq.group.tenant.waiting, seq, key=_reverse_key)
        self.num_waiting_tokens += len(seq.token_ids) - 1

    def leave_waiting(self, seq: Sequence) -> None:
        waiting = seq.group.tenant.waiting
        if waiting[-1] is seq:
            waiting.pop()
        else:
            waiting.remove(seq)
        self.num_waiting_tokens -= len(seq.token_ids) - 1

    def cut(self, seq: Sequence, num: int) -> None:
        """Leave `num` outputs (if > 0) to a waiting sequence, and make a new waiting sequence for its other outputs."""
        if 0 < num < len(seq.indices):
            rest = forked_sequence(seq, seq_id=self.new_seq_id(), index=seq.indices[num], computed=0)
            rest.indices, seq.indices = seq.indices[num:], seq.indices[:num]
            self.enter(rest)
            self.enter_waiting(rest)

    def defer(self, seq: Sequence) -> None:
        seq.status = "deferred"
        self.seqs[seq.seq_id] = seq
        self.deferred[seq.seq_id] = seq

    def undefer(self, seq: Sequence) -> None:
        """Move a deferred sequence into the queue, at the position of its key."""
        del self.deferred[seq.seq_id]
        seq.status = "waiting" if seq.num_cached < 0 else "preempted"
        self.enter(seq)
        self.enter_waiting(seq)

    def defer_again(self, seq: Sequence, num_cached: int) -> None:
        """Defer a sequence of the queue until the images after its `num_cached` tokens are prepared."""
        if not seq.group.is_deferred:
            seq.group.images_from = num_cached
            self.unprepared.append(seq.group)
        self.leave_waiting(seq)
        self.tenants.leave(seq.group.tenant)
        self.defer(seq)

    def end_images(self, group: SequenceGroup) -> None:
        """List a request in `encoded` once each of its sequences has computed the tokens of all images."""
        end = group.request.images[-1].end
        if group.images_from < end and all(seq.status == "running" and seq.computed >= end for seq in group.live):
            group.images_from = end
            self.encoded.append(group.request.request_id)

    def preempt(self, seq: Sequence, *, swap: bool) -> None:
        seq.saved = seq.computed
        seq.num_preemptions += 1
        self.counters.preemptions += 1
        if swap:
            self.counters.preemptions_swap += 1
            self.kv.swap_out(seq)
        else:
            self.counters.preemptions_recompute += 1
            self.kv.release(seq, spill=False)
        self._leave_running(seq)
        seq.status = "preempted"
        seq.drafts = []
        self.enter_waiting(seq)

    def finish(self, seq: Sequence) -> None:
        """End a sequence. The next plan may reuse its blocks even if plans in flight use them: plans run in order."""
        if seq.status == "running":
            self.kv.release(seq)
            self._leave_running(seq)
        elif seq.status == "deferred":
            self.kv.forget_private(seq)
            del self.deferred[seq.seq_id]
        else:
            self.kv.forget_private(seq)
            self.leave_waiting(seq)
        if seq.status != "deferred":
            self.tenants.leave(seq.group.tenant)
        seq.status = "finished"
        del self.seqs[seq.seq_id]
        seq.group.live.remove(seq)
        if not seq.group.live:
            del self.groups[seq.request_id]

    def end_outputs(
        self, seq: Sequence, indices: list[int], reason: FinishReason, error: ErrorInfo | None
    ) -> list[SeqOutput]:
        """Return a terminal record without tokens for each of `indices`."""
        return [
            SeqOutput(
                request_id=seq.request_id,
                index=index,
                finish_reason=reason,
                error=error,
                num_cached_tokens=max(seq.num_cached, 0),
                num_preemptions=seq.num_preemptions,
                timing=seq.timing(self.now),
            )
            for index in indices
        ]

    def forget_at_runner(self, seq: Sequence) -> None:
        """Make the next plan list the sequence as dropped; if it is scheduled again, the runner receives it again."""
        if seq.announced:
            self.dropped.append(seq.seq_id)
        seq.announced = False
        seq.num_sent = 0

    def check(self) -> None:
        config, live = self.config, [*self.seqs.values()]
        self.kv.check(live)
        self.encoder.check()
        assert not self._is_by_key or [s.key for s in self.running] == sorted(s.key for s in self.running)
        for tenant in self.tenants.active.values():
            assert [s.key for s in tenant.waiting] == sorted((s.key for s in tenant.waiting), reverse=True)
            assert tenant.num_seqs == sum(s.group.tenant is tenant for s in live if s.status != "deferred") > 0
        queued = [*self.running, *self.waiting, *self.deferred.values()]
        assert sorted(s.seq_id for s in queued) == sorted(self.seqs)
        assert all(s.status == "deferred" for s in self.deferred.values())
        assert all(s.status == "running" for s in self.running)
        assert all(s.status in ("waiting", "preempted") for s in self.waiting)
        assert self.num_waiting_tokens == sum(len(s.token_ids) - s.computed - 1 for s in self.waiting)
        assert self.num_places == sum(len(s.indices) for s in self.running) <= config.max_num_seqs
        assert sorted(s.seq_id for group in self.groups.values() for s in group.live) == sorted(self.seqs)
        adapters = {s.adapter for s in self.running if s.adapter}
        assert not config.max_loras or len(adapters) <= config.max_loras
        assert self.num_needing_newest == sum(s.needs_newest for s in self.running)
        for seq in live:
            seq.check(config.block_size)
            steps = [step for plan in self.in_flight.values() for step in plan.seqs if step.seq_id == seq.seq_id]
            assert (seq.in_flight, seq.pending) == (len(steps), sum(step.sample for step in steps))

    def _leave_running(self, seq: Sequence) -> None:
        self.running.remove(seq)
        self.num_places -= len(seq.indices)
        self.num_needing_newest -= seq.needs_newest
        self.tenants.usage[seq.group.request.tenant].running -= 1
        self.forget_at_runner(seq)
