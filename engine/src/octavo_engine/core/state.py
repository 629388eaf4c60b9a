"""`SchedulerState`: the state shared by planning and committing: queues, sequences, KV cache and counters.

`running` and `waiting` are both ordered by key (priority, arrival, index), so that the sequence to preempt is always
the last of `running`, which each step schedules last, and a preempted sequence returns to the head of the queue.
`waiting` is stored in reverse, for an O(1) pop. A waiting request with n > 1 is one sequence that needs n places:
`num_places` counts the running sequences and those that they will fork into.
"""

import bisect
from operator import attrgetter

from octavo_engine.core.block_metrics import BlockLifeSampler
from octavo_engine.core.events import KVDeltas
from octavo_engine.core.kv import KVCache
from octavo_engine.core.sequence import Key, Sequence, SequenceGroup
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
        self.groups: dict[str, SequenceGroup] = {}
        self.seqs: dict[SeqId, Sequence] = {}
        self.running: list[Sequence] = []
        self.waiting: list[Sequence] = []
        self.deferred: dict[SeqId, Sequence] = {}  # not in `waiting` until prepared: ready sequences overtake them
        self.num_waiting_tokens = 0  # tokens to compute before each waiting sequence has its next token
        self.num_places = 0
        self.num_needing_newest = 0  # running sequences with `needs_newest`
        self.in_flight: dict[int, StepPlan] = {}
        self.dropped: list[SeqId] = []  # the next plan lists them for the runner to drop
        self.counters = EngineStats(total_blocks=config.num_blocks, host_total_blocks=config.num_host_blocks)
        self.now = 0.0
        self.blocked_by = ""  # why the head of the queue wasn't admitted by the latest step
        self._next_seq_id = 0

    @property
    def steps_ahead(self) -> int:
        """Number of steps that may be planned before the newest tokens are known; 0 while a sequence `needs_newest`."""
        return 0 if self.num_needing_newest else self.config.steps_ahead

    def new_seq_id(self) -> SeqId:
        self._next_seq_id += 1
        return self._next_seq_id

    def enter_running(self, seq: Sequence) -> None:
        seq.status = "running"
        bisect.insort(self.running, seq, key=_key)
        self.num_places += len(seq.indices)
        self.num_needing_newest += seq.needs_newest

    def enter_waiting(self, seq: Sequence) -> None:
        bisect.insort(self.waiting, seq, key=_reverse_key)
        self.num_waiting_tokens += len(seq.token_ids) - 1

    def leave_waiting(self, seq: Sequence) -> None:
        if self.waiting[-1] is seq:
            self.waiting.pop()
        else:
            self.waiting.remove(seq)
        self.num_waiting_tokens -= len(seq.token_ids) - 1

    def defer(self, seq: Sequence) -> None:
        seq.status = "deferred"
        self.deferred[seq.seq_id] = seq

    def undefer(self, seq: Sequence) -> None:
        """Move a deferred sequence into the queue, at the position of its key."""
        del self.deferred[seq.seq_id]
        seq.status = "waiting"
        self.enter_waiting(seq)

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
            del self.deferred[seq.seq_id]
        else:
            self.kv.forget_private(seq)
            self.leave_waiting(seq)
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
        assert [s.key for s in self.running] == sorted(s.key for s in self.running)
        assert [s.key for s in self.waiting] == sorted((s.key for s in self.waiting), reverse=True)
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
        self.forget_at_runner(seq)
