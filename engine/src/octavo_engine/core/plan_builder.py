"""`PlanBuilder`: adds the tokens of sequences to the plan of a step, in the order in which `Planner` chooses them.

The plan with a sequence's first tokens introduces the sequence; later plans have only its new blocks. If a prompt has
several outputs, its sequence is forked, once per further output, in the step that computes the last prompt token.
"""

from octavo_engine.core.prompt_shares import PromptShares
from octavo_engine.core.sequence import Sequence, forked_sequence
from octavo_engine.core.state import SchedulerState
from octavo_engine.wire.plan import NewSeq, SeqStep, StepCosts, StepPlan


class PlanBuilder:
    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self._kv = state.kv
        self.is_fair = (
            state.config.enable_chunked_prefill and state.config.max_step_ms > 0
        )  # steps have a limit of time
        self._costs = StepCosts()
        self._logprobs_left_s = 0.0  # of this step's time for prompt log-probabilities
        self._forks: list[Sequence] = []
        self.plan = StepPlan(step_id=0)

    def begin_step(self, costs: StepCosts) -> StepPlan:
        """Return the next plan, which is empty."""
        self._costs, self._logprobs_left_s = costs, self._state.config.max_step_ms / 1000
        self.plan = StepPlan(step_id=self.plan.step_id + 1)
        self._kv.begin_step(self.plan)
        self._state.encoder.begin_step(self.plan, costs)
        return self.plan

    def end_step(self) -> None:
        self._kv.end_step()
        for child in self._forks:
            self._state.num_places -= 1  # counted for the parent until now
            self._state.enter_running(child)
        self._forks.clear()

    def schedule(self, seq: Sequence, want: int, shares: PromptShares | None, *, is_limited: bool) -> int:
        """Add up to `want` tokens of `seq`, whose blocks are allocated, to the plan; return the number of added tokens.

        The number is lower if the prompt log-probabilities of the tokens take too long, or if an image must wait: only
        tokens before this image are added. `shares`, `is_limited`: see `EncoderCache.encode`.
        """
        if seq.prompt_logprobs is not None and self.is_fair and self._costs.logprob_row_s:
            want = min(want, max(1, int(self._logprobs_left_s / self._costs.logprob_row_s)))
            self._logprobs_left_s -= want * self._costs.logprob_row_s
        want = self.encode_images(seq, want, shares, is_limited=is_limited)
        if not want:
            return 0
        start, num_tokens = seq.computed, min(want, seq.length - seq.computed)
        samples = start + num_tokens == seq.length
        self._announce(seq)
        step = SeqStep(
            seq_id=seq.seq_id, start=start, num_tokens=num_tokens, sample=samples, draft_token_ids=seq.drafts
        )
        self._send_table(seq, step)
        if seq.prompt_logprobs is not None:
            step.num_prompt_logprobs = max(min(start + num_tokens, seq.num_prompt - 1) - start, 0)
        self.plan.seqs.append(step)
        seq.computed = start + want
        seq.in_flight += 1
        seq.pending += samples
        seq.num_drafts, seq.drafts = len(seq.drafts), []
        if seq.group.request.images:
            self._state.end_images(seq.group)
        self._kv.register_full(seq, min(start + num_tokens, len(seq.token_ids)))
        if samples and len(seq.indices) > 1:
            self._fork_outputs(seq)
        return want

    def encode_images(self, seq: Sequence, want: int, shares: PromptShares | None, *, is_limited: bool) -> int:
        """Plan the encoding of images; return how many of `want` tokens come before an image that must wait."""
        if not seq.group.request.images:
            return want
        state, encode = self._state, self.plan.encode
        want = state.encoder.encode(seq, want, state.running, is_limited=is_limited, shares=shares)
        if encode and encode[-1][0] == seq.seq_id:
            self._announce(seq)  # the first prompt may get no token yet
        seq.drafts = seq.drafts[: max(want - (seq.length - seq.computed), 0)]
        return want

    def _fork_outputs(self, parent: Sequence) -> None:
        """Fork a child for each further output, which samples its first token from the parent's last prompt row."""
        for index in parent.indices[1:]:
            child = forked_sequence(
                parent, seq_id=self._state.new_seq_id(), index=index, computed=len(parent.token_ids)
            )
            self._kv.fork(parent, child)
            self._state.enter(child)
            self._forks.append(child)
            self._announce(child)
            step = SeqStep(seq_id=child.seq_id, start=child.computed, num_tokens=0, sample=True)
            step.logits_from = parent.seq_id
            self._send_table(child, step)
            self.plan.seqs.append(step)
            child.in_flight += 1
            child.pending += 1
        del parent.indices[1:]
        # `num_places` still includes the children, which become running sequences at the end of the step.

    def _announce(self, seq: Sequence) -> None:
        if seq.announced:
            return
        seq.announced = True
        request = seq.group.request
        self.plan.new_seqs.append(
            NewSeq(
                seq_id=seq.seq_id,
                token_ids=list(seq.token_ids),
                num_prompt_tokens=seq.num_prompt,
                params=request.params,
                seed=seq.seed,
                eos_token_id=request.eos_token_id,
                adapter=request.adapter,
                grammar=request.grammar,
                pooling=request.pooling,
                images=tuple(image.span for image in request.images),
            )
        )

    def _send_table(self, seq: Sequence, step: SeqStep) -> None:
        if seq.num_sent < len(seq.table):
            step.table_start = seq.num_sent
            step.block_ids = [seq.table[seq.num_sent :]]
            seq.num_sent = len(seq.table)
