"""`Scheduler`: the engine's decisions, without tensors, clocks or I/O. `step` plans, `commit` applies the result.

Several plans may be issued before the first result arrives; they run, and are committed, in order. Equal inputs give
equal decisions, so that a trace can be replayed. Every (request, index) that `add` accepted gets exactly one record
with a `finish_reason`, from `commit`, `abort` or `prepared`. docs/internals/scheduler.md describes the decisions.
"""

from dataclasses import replace

from octavo_engine.core.committer import Committer
from octavo_engine.core.events import KVDelta, KVDeltas
from octavo_engine.core.planner import Planner
from octavo_engine.core.sequence import Key, Sequence, forked_sequence, new_sequence
from octavo_engine.core.state import SchedulerState
from octavo_engine.settings.records import SchedulerConfig
from octavo_engine.wire.errors import ContextLengthExceeded, InvalidRequest, StartupError
from octavo_engine.wire.hashing import scoped_root
from octavo_engine.wire.inspection import SequenceInfo
from octavo_engine.wire.kv_stream import Tier
from octavo_engine.wire.plan import SeqId, StepCosts, StepPlan, StepResult
from octavo_engine.wire.records import BlockLife, EngineRequest, EngineStats, ErrorInfo, SeqOutput, TenantUsage

NO_COSTS = StepCosts()
MAX_WEIGHT = 1e9


class Limits:
    """Rejects requests that could never run: such a request at the head of the queue would block all later ones.

    No sequence may have more than `max_len` tokens, the smaller of `max_model_len` and the size of the KV cache, so
    every admitted sequence can run to its end once it is alone.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        for name in ("max_model_len", "num_blocks", "block_size", "max_num_seqs", "max_num_batched_tokens"):
            if getattr(config, name) < 1:
                raise StartupError(f"{name} must be at least 1, got {getattr(config, name)}.")
        if not config.enable_chunked_prefill and config.max_num_batched_tokens < config.max_model_len:
            raise StartupError(
                f"Without chunked prefill a prompt is computed in one step, but max_num_batched_tokens="
                f"{config.max_num_batched_tokens} is below max_model_len={config.max_model_len}: raise the former, "
                f"lower the latter, or enable chunked prefill."
            )
        self._config = config
        self._capacity = config.num_blocks * config.block_size
        self.max_len = min(config.max_model_len, self._capacity)

    def check(self, request: EngineRequest) -> None:
        num_input, n = len(request.prompt_token_ids), request.params.n
        num_output = 0 if request.pooling is not None else 1
        if num_input < 1:
            raise InvalidRequest("The prompt is empty: give at least one token.", param="prompt")
        if num_input + num_output > self._config.max_model_len:
            raise ContextLengthExceeded(
                max_model_len=self._config.max_model_len,
                num_requested=request.params.max_tokens or num_output,
                num_input=num_input,
            )
        if num_input + num_output > self._capacity:
            reserved = ", one of them for output" if num_output else ""
            raise InvalidRequest(
                f"The prompt has {num_input} tokens; the KV cache holds {self._capacity}{reserved}: shorten the "
                "prompt or give the KV cache more memory.",
                param="input_tokens",
            )
        if not 0 < request.weight <= MAX_WEIGHT:
            raise InvalidRequest(
                f"The tenant's weight is {request.weight}; it must be above 0 and at most {MAX_WEIGHT:g}.",
                param="weight",
            )
        if n > self._config.max_num_seqs:
            raise InvalidRequest(
                f"n={n} outputs run side by side; the limit is max_num_seqs={self._config.max_num_seqs}: "
                f"lower n or raise max_num_seqs.",
                param="n",
            )


class Scheduler:
    """Construction raises StartupError for a configuration under which an accepted request could never run."""

    def __init__(self, config: SchedulerConfig, *, kv_events: bool = False, kv_tokens: bool = False) -> None:
        self.config = config
        self._limits = Limits(config)
        self._deltas = KVDeltas(enabled=kv_events or kv_tokens, with_tokens=kv_tokens)
        self._state = SchedulerState(config, self._deltas)
        self._planner = Planner(self._state)
        self._committer = Committer(self._state)
        self._num_added = 0

    def add(self, request: EngineRequest, now: float, *, deferred: bool = False) -> None:
        """Queue a request. Raises InvalidRequest if it could never run.

        A deferred request is scheduled only after a call of `prepared`; until then, later requests overtake it. A
        request with images is deferred, unless the blocks of all its images are cached; see `unprepared`.
        """
        state = self._state
        if request.request_id in state.groups:
            raise InvalidRequest(f"Request id {request.request_id} is in use already.", param="request_id")
        self._limits.check(request)
        state.now = now
        self._num_added += 1
        seq = new_sequence(
            request, seq_id=state.new_seq_id(), key=self._key(request), max_len=self._limits.max_len, now=now
        )
        seq.root_hash = scoped_root(self.config.hash_root, request.adapter, request.cache_salt)
        state.groups[request.request_id] = seq.group
        state.encoder.make_fit(request.images)
        seq.group.images_from = state.kv.touch(seq)
        state.unprepared = [seq.group] if any(image.end > seq.group.images_from for image in request.images) else []
        if deferred or state.unprepared:
            state.defer(seq)
        else:
            state.enter(seq)
            state.enter_waiting(seq)

    @property
    def unprepared(self) -> list[tuple[EngineRequest, int]]:
        """Requests that the latest `add` or `step` has deferred for images. The images that end after the given
        position must be prepared."""
        return [(group.request, group.images_from) for group in self._state.unprepared]

    @property
    def encoded(self) -> list[str]:
        """Requests whose images are not needed once the latest plan has run, unless `unprepared` lists them again."""
        return self._state.encoded

    def prepared(self, request_id: str, now: float, *, error: ErrorInfo | None = None) -> list[SeqOutput]:
        """Queue a deferred request whose inputs are ready, or end it with `error`. An unknown id is ignored."""
        state, outputs = self._state, list[SeqOutput]()
        state.now = now
        group = state.groups.get(request_id)
        for seq in [s for s in group.live if s.status == "deferred"] if group else ():
            if error is None:
                state.undefer(seq)
            else:
                outputs += state.end_outputs(seq, seq.indices, "error", error)
                state.finish(seq)
        if error is not None and group is not None and group.request.images:
            group.images_from = group.request.images[-1].end  # its later sequences must prepare images again
        self._check_invariants()
        return outputs

    def abort(self, request_id: str, index: int | None = None) -> list[SeqOutput]:
        """End a request, or one of its outputs; return the terminal records, none if it has ended already."""
        group = self._state.groups.get(request_id)
        outputs: list[SeqOutput] = []
        for seq in [*group.live] if group else ():
            ended = [i for i in seq.indices if index in (None, i)]
            outputs += self._state.end_outputs(seq, ended, "abort", None)
            if ended == seq.indices:
                self._state.finish(seq)
            elif ended:
                self._drop_outputs(seq, ended)
        self._check_invariants()
        return outputs

    def step(self, now: float, costs: StepCosts = NO_COSTS) -> StepPlan:
        """Plan the next step. The plan is empty if no sequence can run now; an empty plan must not be committed."""
        self._state.now = now
        self._state.unprepared, self._state.encoded = [], []
        plan = self._planner.step(costs)
        self._check_invariants()
        return plan

    def commit(self, result: StepResult, now: float) -> list[SeqOutput]:
        self._state.now = now
        outputs = self._committer.commit(result)
        self._check_invariants()
        return outputs

    def fork(self, seq_id: SeqId) -> SeqId:
        """Add a sequence to the parent's request, with the parent's tokens and the next index; return its id.

        The child shares the parent's blocks and recomputes at most one token; if `max_num_seqs` is reached, it waits.
        Raises KeyError if the parent has ended, ValueError if the parent has not forked its own outputs yet.
        """
        state, parent = self._state, self._state.seqs[seq_id]
        if len(parent.indices) > 1:
            raise ValueError(f"sequence {seq_id} still stands for outputs {parent.indices}")
        index, parent.group.next_index = parent.group.next_index, parent.group.next_index + 1
        runs = parent.status == "running" and state.num_places < self.config.max_num_seqs
        computed = min(parent.computed, len(parent.token_ids) - 1) if runs else 0
        child = forked_sequence(parent, seq_id=state.new_seq_id(), index=index, computed=computed)
        if parent.status != "deferred":
            state.enter(child)
        if runs:
            state.kv.fork(parent, child)
            state.enter_running(child)
        elif parent.status == "deferred":
            state.defer(child)
        else:
            state.enter_waiting(child)
        self._check_invariants()
        return child.seq_id

    def decoding(self) -> list[Sequence]:
        """Return the running sequences whose next step computes one generated token, the newest."""
        running = self._state.running
        return [seq for seq in running if seq.computed == len(seq.token_ids) - 1 >= seq.num_prompt]

    def propose(self, seq_id: SeqId, draft_token_ids: list[int]) -> None:
        """Set the draft tokens that the sequence's next decode step verifies; ignored if no step is due."""
        seq = self._state.seqs.get(seq_id)
        if seq is not None and seq.status == "running" and seq.computed < len(seq.token_ids):
            seq.drafts = list(draft_token_ids)

    def reset_prefix_cache(self) -> bool:
        """Evict all cached blocks, on device and host, and the rows of images.

        Return False and do nothing while any block is in use.
        """
        state = self._state
        if state.kv.pool.num_in_use:
            return False
        for seq in [*state.waiting, *state.deferred.values()]:
            state.kv.forget_private(seq)
        state.kv.forget_contents()
        state.encoder.forget_all()
        return True

    def sequences(self) -> list[Sequence]:
        """Return the unfinished sequences: running, waiting, then deferred ones, each in order of service."""
        return [*self._state.running, *self._state.waiting, *self._state.deferred.values()]

    def is_live(self, request_id: str) -> bool:
        return request_id in self._state.groups

    def is_waiting(self, request_id: str) -> bool:
        """Return True if no part of an unfinished request was ever scheduled; False for an unknown request."""
        group = self._state.groups.get(request_id)
        return group is not None and all(seq.num_cached < 0 for seq in group.live)

    @property
    def max_in_flight(self) -> int:
        """Number of plans that should be in flight: the step in progress, plus `SchedulerState.steps_ahead`."""
        return 1 + self._state.steps_ahead

    def has_work(self) -> bool:
        """Return True if any unfinished sequence is not deferred."""
        return len(self._state.seqs) > len(self._state.deferred)

    def waiting_reason(self, request_id: str) -> str | None:
        """Return why a request waits: "grammar", "images" or "adapter", or why the head of the queue was not admitted.

        The reasons of the head are "capacity", "budget", "max_num_seqs" and "max_loras". None: no sequence of it waits.
        """
        group = self._state.groups.get(request_id)
        if group is not None and any(seq.status == "deferred" for seq in group.live):
            if group.request.images:
                return "images"
            return "adapter" if group.request.grammar is None else "grammar"
        waits = group is not None and any(seq.status != "running" for seq in group.live)
        return (self._state.blocked_by or "budget") if waits else None

    def describe_sequences(self, now: float) -> list[SequenceInfo]:
        return [self._describe(seq, now) for seq in self.sequences()]

    def _describe(self, seq: Sequence, now: float) -> SequenceInfo:
        assert seq.status != "finished"
        has_run = seq.num_cached >= 0
        return SequenceInfo(
            request_id=seq.request_id,
            indices=list(seq.indices),
            state=seq.status,
            waiting_reason=None if seq.status == "running" else self.waiting_reason(seq.request_id),
            prompt_tokens=seq.num_prompt,
            generated_tokens=seq.num_output,
            computed_tokens=seq.computed,
            cached_tokens=max(seq.num_cached, 0),
            blocks=len(seq.table),
            preemptions=seq.num_preemptions,
            priority=seq.group.request.priority,
            age_s=now - seq.arrival_s,
            queued_s=(seq.scheduled_s if has_run else now) - seq.arrival_s,
        )

    def stats(self) -> EngineStats:
        """Return a snapshot of gauges and counters; the caller, which has a clock, sets `step_s`."""
        state, pool, host = self._state, self._state.kv.pool, self._state.kv.host
        return replace(
            state.counters,
            accepted_draft_tokens=[*state.counters.accepted_draft_tokens],
            running=len(state.running),
            waiting=state.num_waiting + len(state.deferred),
            deferred=len(state.deferred),
            free_blocks=pool.num_free,
            cached_blocks=pool.num_cached,
            in_use_blocks=pool.num_in_use,
            host_used_blocks=host.num_used if host else 0,
            kv_used_slots=self._used_slots(),
            prefill_backlog_tokens=self._prefill_backlog(),
            swapped_out_blocks=state.kv.num_swapped_out,
            swapped_in_blocks=state.kv.num_swapped_in,
            dropped_blocks=state.kv.num_dropped,
            cow_copies=state.kv.num_copies,
            encoded_images=state.encoder.num_encoded,
            encoder_usage=state.encoder.usage,
        )

    def take_block_lives(self) -> list[BlockLife]:
        """Return the block lives that ended since the last call; empty without `block_lives_every`."""
        lives = self._state.lives
        return lives.pop_ended() if lives is not None else []

    def take_tenant_usage(self) -> dict[str, TenantUsage]:
        """Return the usage since the last call, by tenant, of tenants with any."""
        return self._state.tenants.take_usage()

    def take_kv_delta(self) -> KVDelta:
        """Return the net change of cached hashes since the last call; empty without `kv_events` or `kv_tokens`."""
        return self._deltas.drain()

    def cached_hashes(self) -> list[tuple[Tier, bytes]]:
        """Return all cached hashes by tier: the snapshot to which the next `take_kv_delta` applies."""
        kv = self._state.kv
        hashes: list[tuple[Tier, bytes]] = [("device", h) for h in kv.pool.cached_hashes()]
        return hashes + [("host", h) for h in (kv.host.cached_hashes() if kv.host else ())]

    def check(self) -> None:
        """Assert every invariant of the state; the cost is proportional to the number of blocks."""
        self._state.check()

    def _key(self, request: EngineRequest) -> Key:
        priority = request.priority if self.config.policy == "priority" else 0
        return priority, request.arrival_s, self._num_added, 0

    def _drop_outputs(self, seq: Sequence, indices: list[int]) -> None:
        """Remove some outputs that a sequence stands for until it forks them.

        The runner samples the sequence with the seed of its first index; if that index is removed, the sequence is
        sent to the runner again.
        """
        keeps_first = seq.indices[0] not in indices
        seq.indices = [i for i in seq.indices if i not in indices]
        if seq.status == "running":
            self._state.num_places -= len(indices)
            if not keeps_first:
                self._state.forget_at_runner(seq)

    def _prefill_backlog(self) -> int:
        """Count the tokens to compute before every sequence can sample its next token, including tokens in flight.

        Tokens that a waiting sequence may find in the cache are not subtracted.
        """
        state = self._state
        running = sum(max(len(s.token_ids) - s.computed - 1, 0) for s in state.running)
        under_way = sum(
            step.num_tokens - 1 for plan in state.in_flight.values() for step in plan.seqs if step.num_tokens
        )
        return running + under_way + state.num_waiting_tokens

    def _used_slots(self) -> int:
        """Count the token slots of blocks in use that hold KV; a tail block shared by forked siblings counts once."""
        pool, size = self._state.kv.pool, self.config.block_size
        unused = 0.0
        for seq in self._state.running:
            empty = len(seq.table) * size - seq.computed
            if empty > 0:
                unused += empty / pool.refs[seq.table[-1]]
        return pool.num_in_use * size - round(unused)

    def _check_invariants(self) -> None:
        if self.config.debug_invariants:
            self.check()
