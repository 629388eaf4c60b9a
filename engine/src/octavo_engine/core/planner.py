"""`Planner`: makes one `StepPlan` from the state.

It first schedules the running sequences in order, prefill chunks and decodes alike, from one token budget; if blocks
run out, the latest sequences are preempted. If none was preempted, it then admits waiting sequences in order: the head
of the queue gets blocks for all its tokens or is not admitted, and no later sequence overtakes it. While no sequence
runs the head always fits, because `Scheduler.add` rejects larger requests. A sequence whose adapter would exceed the
step's limit is overtaken by sequences without an adapter.

While tenants compete, each has its own queue, and the head of the least served tenant's queue is first; if it must
wait, only tenants that are a whole step ahead wait, too. The head of a tenant that runs nothing, or was served less
than another, is admitted before running sequences are scheduled; sequences of other tenants are preempted for it.

With `max_step_ms`, decodes (sequences with one token to compute) come first, and `PromptShares` divides the rest of the
step between prompts. The first prompt is scheduled last: it gets the tokens that later prompts leave.

A chunk ends before an image that must wait (`EncoderCache`), so it may be empty.

With `steps_ahead`, a sequence whose newest token is sampled by a plan in flight gets its next decode step: the runner
takes the token from its device. If this token reaches the length limit, there is no next step.
"""

from collections.abc import Iterator
from heapq import heapify, heappop, heappush

from octavo_engine.core.plan_builder import PlanBuilder
from octavo_engine.core.preemption import prefers_swap, victims_for
from octavo_engine.core.prompt_shares import UNMEASURED_TOKENS, PromptShares
from octavo_engine.core.sequence import Sequence
from octavo_engine.core.state import SchedulerState
from octavo_engine.core.tenants import Tenant
from octavo_engine.wire.plan import SeqStep, StepCosts, StepPlan

MAX_MISFITS = 16  # a step admits nothing after this many heads without enough blocks: each costs a lookup


class StepAdapters:
    """The adapters of a step: at most `limit` different ones (0: no limit).

    Once a sequence must wait for an adapter, later sequences with adapters wait, too, so that it can join a later step.
    """

    def __init__(self, limit: int, running: list[Sequence]) -> None:
        self._limit = limit
        self._adapters = {seq.adapter for seq in running if seq.adapter} if limit else set[str]()
        self._is_full = False

    def admit(self, adapter: str) -> bool:
        """Return whether a sequence with this adapter may join the step. "": the sequence uses no adapter."""
        if not adapter or not self._limit:
            return True
        self._is_full = self._is_full or len(self._adapters | {adapter}) > self._limit
        if not self._is_full:
            self._adapters.add(adapter)
        return not self._is_full


class Planner:
    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self._kv = state.kv
        self._config = state.config
        self._builder = PlanBuilder(state)
        self._plan = self._builder.plan
        self._costs = StepCosts()
        self._shares_step = self._builder.is_fair  # True: the step's prompts share its time
        self._fresh: set[Sequence] = set()  # sequences admitted early, which this step must not preempt
        self._givers: set[Tenant] = set()  # tenants that lost a sequence in this step, and admit none in it
        self._num_misfits = 0
        self._prompts: list[Sequence] = []  # running, in order, with their blocks
        self._num_reserved = 0  # tokens of this step reserved for the prompts
        self._shares: PromptShares | None = None  # set while prompts get their shares
        self._first: Sequence | None = None  # the first prompt, and the tokens reserved for it
        self._reserved = 0

    def step(self, costs: StepCosts) -> StepPlan:
        state = self._state
        plan = self._plan = self._builder.begin_step(costs)
        self._costs = costs
        budget = self._config.max_num_batched_tokens
        self._num_misfits = 0
        if state.tenants.compete:
            self._admit_less_served(budget)
        self._shares_step = self._builder.is_fair or (self._config.enable_chunked_prefill and state.tenants.compete)
        state.order_running()
        preemptions = state.counters.preemptions
        left = self._schedule_running(budget)
        state.blocked_by = "capacity"
        admits = state.counters.preemptions == preemptions
        if self._shares_step:
            left = self._share_step(left, admits=admits)
        elif admits:
            left = self._admit_waiting(left)
        self._builder.end_step()
        self._fresh.clear()
        self._givers.clear()
        state.tenants.charge(plan.seqs, state.seqs, budget - left)
        plan.dropped_seqs, state.dropped = state.dropped, []
        if not plan.is_empty:
            state.in_flight[plan.step_id] = plan
            state.counters.steps += 1
        state.counters.batched_tokens = budget - left
        return plan

    def _schedule_running(self, budget: int) -> int:
        """Schedule the running sequences; return the budget left. A decode step without a new block is inline."""
        running, size = self._state.running, self._config.block_size
        refs, steps, ahead = self._kv.pool.refs, self._plan.seqs, self._state.steps_ahead
        position = 0
        while position < len(running) and budget > 0:
            seq = running[position]
            position += 1
            start, table, pending = seq.computed, seq.table, seq.pending
            length = len(seq.token_ids) + pending
            if pending and (pending > ahead or length >= seq.limit):
                continue
            todo = length - start
            if todo == 1 and start >= seq.num_prompt and not seq.drafts and seq.num_sent == len(table):
                block_position, offset = divmod(start, size)
                if 0 < offset < size - 1 and refs[table[block_position]] == 1:
                    steps.append(SeqStep(seq_id=seq.seq_id, start=start, num_tokens=1, sample=True))
                    seq.computed = start + 1
                    seq.in_flight += 1
                    seq.pending = pending + 1
                    budget -= 1
                    continue
            if todo <= 0:
                continue
            if todo > 1 and self._shares_step:
                budget -= self._collect_prompt(seq, position)
                if seq.status != "running":
                    break
                continue
            if seq.drafts:
                self._cut_drafts(seq, budget, num_later=len(running) - position)
            want = self._share_of(seq, start, budget)
            if not want:
                continue
            if not self._make_room(seq, position, start + want):
                if seq.status == "running":
                    continue
                break
            self._kv.grow(seq, start + want)
            budget -= self._schedule(seq, want)
        return budget

    def _cut_drafts(self, seq: Sequence, budget: int, *, num_later: int) -> None:
        """Cut drafts to the sequence's length limit, and to tokens and blocks that no later sequence may need.

        The later sequences, which decode or have a prompt, need one token each, and at most one block for it.
        """
        length, pool = len(seq.token_ids), self._kv.pool
        copied = self._kv.shared_write_block(seq) is not None
        blocks = len(seq.table) + max(pool.num_available - num_later - copied, 0)
        room = min(seq.limit - 1, blocks * self._config.block_size) - length
        seq.drafts = seq.drafts[: max(min(room, budget - num_later - (length - seq.computed)), 0)]

    def _collect_prompt(self, seq: Sequence, position: int) -> int:
        """Make a prompt's next block writable, and keep it for its share of the step; return the tokens reserved."""
        seq.drafts = []  # they follow tokens that this step may not reach
        self._share_computed(seq)
        if not self._make_room(seq, position, len(seq.token_ids)):
            return 0
        self._kv.grow(seq, len(seq.token_ids))
        self._prompts.append(seq)
        if self._num_reserved or self._state.encoder.lacks_next(seq):  # it may have to wait for its image
            return 0
        self._num_reserved = 1  # the first prompt advances, however many sequences decode
        return 1

    def _share_step(self, budget: int, *, admits: bool) -> int:
        """Divide what the decodes leave of the step between the prompts; return the tokens left."""
        prompts, self._prompts = self._prompts, []
        max_step_s = self._config.max_step_ms / 1000
        if self._state.tenants.compete:
            prompts.sort(key=lambda seq: (seq.key[0], seq.group.tenant.counter, seq.key))
            max_step_s = 0.0  # prompts: at most the time of the rest of the step
        budget, self._num_reserved = budget + self._num_reserved, 0
        withheld = 0 if self._costs.prefill_token_s else max(budget - UNMEASURED_TOKENS, 0)
        budget -= withheld
        self._shares = PromptShares(max_step_s, self._costs, self._plan.seqs)
        for seq in prompts:
            if budget > 0 and (want := self._share_of(seq, seq.computed, budget)):
                budget -= self._place(seq, want, budget)
        if admits:
            budget = self._admit_waiting(budget)
        if self._first is not None:
            budget = self._schedule_first(self._first, self._shares, budget + self._reserved)
        self._shares = self._first = None
        return budget + withheld

    def _place(self, seq: Sequence, want: int, budget: int) -> int:
        """Schedule `want` tokens, or reserve the first prompt's share, which is scheduled last; return the tokens."""
        if self._shares is not None:
            todo = len(seq.token_ids) - seq.computed
            is_first = self._first is None and todo > 1
            want = self._builder.encode_images(seq, 1 if is_first else want, self._shares, is_limited=self._shares_step)
            if not want:
                return 0
            if is_first:
                self._first = seq
                self._reserved = self._shares.reserve_first(seq.computed, todo, budget)
                return self._reserved
            if seq.group.request.images and self._first is not None:  # encoding may have taken time
                want = self._shares.later(seq.computed, want, budget)
                if not want:
                    return 0
            self._shares.spend(seq.computed, want)
        return self._schedule(seq, want)

    def _schedule_first(self, seq: Sequence, shares: PromptShares, budget: int) -> int:
        """Schedule the first prompt within `budget` and the time that other prompts leave; return the new budget."""
        state = self._state
        self._share_computed(seq)
        delays_others = len(state.running) > 1 or (state.num_waiting and state.blocked_by == "budget")
        want = self._below_threshold(len(seq.token_ids) - seq.computed)
        return budget - self._schedule(seq, shares.first(seq.computed, want, budget, alone=not delays_others))

    def _share_computed(self, seq: Sequence) -> None:
        gained = self._kv.share_computed(seq)
        if not seq.num_preemptions and seq.key[-1] == 0:
            seq.num_cached += gained
            self._state.count_cached(gained, seq)

    def _below_threshold(self, num_tokens: int) -> int:
        return min(num_tokens, self._config.long_prefill_token_threshold or num_tokens)

    def _share_of(self, seq: Sequence, start: int, budget: int) -> int:
        """Return how many tokens of `seq` from `start` on this step computes; cut its drafts to the number that fits.

        The result is 0 only without chunked prefill, for a prompt that exceeds the remaining budget.
        """
        todo = seq.length - start
        want = todo + len(seq.drafts)
        if self._config.enable_chunked_prefill:
            want = min(self._below_threshold(want), budget)
            if self._shares is not None and self._first is not None:
                want = self._shares.later(start, self._below_threshold(todo), budget)
        else:
            want = min(want, budget) if budget >= todo else 0
        seq.drafts = seq.drafts[: max(want - todo, 0)]
        return want

    def _make_room(self, seq: Sequence, position: int, end: int) -> bool:
        """Preempt the latest sequences until `seq` can have blocks up to token `end`; return False if it must wait.

        If preempting all later sequences does not suffice, `seq` itself is preempted, unless that would free no block.
        """
        shortfall = self._kv.blocks_needed(seq, end) - self._kv.pool.num_available
        if shortfall <= 0:
            return True
        later = self._preemptible(self._state.running[position:])
        victims = victims_for(seq, later, shortfall=shortfall, kv=self._kv)
        gives_way = victims is None
        if victims is None:
            victims = [seq] if any(self._kv.pool.refs[block] == 1 for block in seq.table) else []
        self._preempt(victims)
        return not gives_way

    def _preemptible(self, running: list[Sequence]) -> list[Sequence]:
        return [seq for seq in running if seq not in self._fresh] if self._fresh else running

    def _preempt(self, victims: list[Sequence]) -> None:
        for victim in victims:
            swap = prefers_swap(victim, mode=self._config.preemption_mode, costs=self._costs, kv=self._kv)
            self._state.preempt(victim, swap=swap)

    def _heads(self) -> Iterator[Sequence]:
        """Yield the first waiting sequence of each tenant, least served tenant first; after an admission also its next.

        A sequence whose adapter must wait is skipped. Once a sequence finds no blocks, the iteration ends at the first
        sequence that has a worse priority, or whose tenant is a step ahead.
        """
        heads = [tenant.head for tenant in self._state.tenants.active.values() if tenant.waiting]
        heapify(heads)
        adapters, positions = StepAdapters(self._config.max_loras, self._state.running), dict[Tenant, int]()
        end, num_misfits = None, self._num_misfits
        while heads and self._num_misfits < MAX_MISFITS:
            priority, counter, _, tenant = heappop(heads)
            if end is not None and (priority, counter) >= end:
                return
            position = min(positions.get(tenant, len(tenant.waiting)), len(tenant.waiting)) - 1
            while position >= 0 and not adapters.admit(tenant.waiting[position].adapter):
                position -= 1
            positions[tenant] = position + 1
            if position < 0:
                self._state.blocked_by = "max_loras"
                continue
            seq = tenant.waiting[position]
            if seq.in_flight or tenant in self._givers:  # the token sampled before its preemption may be unknown yet
                continue
            yield seq
            if end is None and self._num_misfits > num_misfits:
                end = priority, counter + self._config.max_num_batched_tokens
            if seq.status in ("running", "deferred") and tenant.waiting:
                heappush(heads, tenant.head)

    def _admit_less_served(self, budget: int) -> None:
        """Admit heads of tenants that run nothing or were served less than another; preempt other tenants if needed."""
        state, tenants = self._state, self._state.tenants
        tenants.measure(state.running)
        state.order_running()
        most = max(tenant.counter for tenant in tenants.active.values())
        for seq in self._heads():
            tenant = seq.group.tenant
            waits = tenant.counter >= most or tenant.num_prompt_tokens >= budget
            if waits and tenant.first is not None:
                continue
            state.cut(seq, max(self._config.max_num_seqs - state.num_places, tenants.places_left(tenant)))
            if self._take_back(seq) and self._admit(seq, budget):
                self._fresh.add(seq)

    def _take_back(self, seq: Sequence) -> bool:
        """Preempt sequences of tenants that use more, until `seq` fits; return False if that is impossible."""
        state, tenants = self._state, self._state.tenants
        places = state.num_places + len(seq.indices) - self._config.max_num_seqs
        hit = self._kv.lookup(seq)
        blocks = self._kv.shortfall(seq, hit, alone=False) + tenants.num_growing
        self._kv.cancel(hit)
        if (places <= 0 and blocks <= 0) or seq.group.needs_images(hit.tokens):
            return True
        givers, firsts = tenants.givers(seq), {tenant.first for tenant in tenants.active.values()}
        later = [s for s in self._preemptible(state.running) if s.group.tenant in givers and s not in firsts]
        later = [s for s in later if s.key[0] >= seq.key[0]]  # no sequence is preempted for a worse priority
        victims = victims_for(seq, later, shortfall=blocks, kv=self._kv, places=places)
        if not victims:
            self._num_misfits += 1
            return False
        self._preempt(victims)
        self._givers.update(victim.group.tenant for victim in victims)
        tenants.measure(state.running)
        state.order_running()
        return True

    def _admit_waiting(self, budget: int) -> int:
        state, config = self._state, self._config
        for seq in self._heads() if budget > 0 else ():
            free = config.max_num_seqs - state.num_places
            if state.tenants.compete and len(seq.indices) > state.tenants.places_left(seq.group.tenant):
                state.cut(seq, free)
            if len(seq.indices) > free:
                state.blocked_by = "max_num_seqs"
                continue
            want = self._admit(seq, budget)
            if want:
                budget -= self._place(seq, want, budget)
            assert state.running or state.in_flight or state.deferred, (
                f"nothing runs, yet {seq.request_id} isn't admitted"
            )
            if budget <= 0:
                break
        if budget <= 0 and state.num_waiting:
            state.blocked_by = "budget"
        return budget

    def _admit(self, seq: Sequence, budget: int) -> int:
        """Move the head of the queue to the running sequences; return its tokens in this step, or 0 if it must wait."""
        state = self._state
        hit = self._kv.lookup(seq)
        if seq.group.needs_images(hit.tokens):
            self._kv.cancel(hit)
            state.defer_again(seq, hit.tokens)
            return 0
        want = self._share_of(seq, hit.tokens, budget)
        if want == 0:
            self._kv.cancel(hit)
            state.blocked_by = "budget"
            return 0
        if not self._kv.admit(seq, hit, alone=not state.running):
            state.blocked_by = "capacity"
            self._num_misfits += 1
            return 0
        state.leave_waiting(seq)
        if seq.status == "waiting":
            self._count_first_run(seq, hit.tokens)
        state.counters.recomputed_tokens += max(seq.saved - hit.tokens, 0)
        state.enter_running(seq)
        if state.tenants.compete:
            seq.group.tenant.hold(seq, self._kv.block_size)
        return want

    def _count_first_run(self, seq: Sequence, num_cached: int) -> None:
        seq.scheduled_s = self._state.now
        if seq.group.num_cached >= 0:  # outputs of a request were split: its prompt counts once
            seq.num_cached = seq.group.num_cached
            return
        seq.num_cached = seq.group.num_cached = num_cached
        if self._config.enable_prefix_caching and seq.params.reads_prefix_cache:
            self._state.counters.prefix_cache_queries += len(seq.token_ids)
            self._state.count_cached(num_cached, seq)

    def _schedule(self, seq: Sequence, want: int) -> int:
        return self._builder.schedule(seq, want, self._shares, is_limited=self._shares_step)
