"""`Committer`: applies the result of a step to the state and returns each sequence's output.

Results arrive in the order of their plans. If a sequence was aborted meanwhile, its result is ignored. A sequence that
was preempted meanwhile keeps its token: the token was sampled from correct logits before the blocks were reused. A
token that a plan in flight samples after the sequence's end is ignored.
"""

from octavo_engine.core.sequence import Sequence
from octavo_engine.core.state import SchedulerState
from octavo_engine.wire.plan import SeqResult, SeqStep, StepPlan, StepResult
from octavo_engine.wire.records import ErrorInfo, FinishReason, SeqOutput

Stop = tuple[FinishReason | None, int | None]
NOT_STOPPED: Stop = (None, None)


class Committer:
    def __init__(self, state: SchedulerState) -> None:
        self._state = state

    def commit(self, result: StepResult) -> list[SeqOutput]:
        plan = self._state.in_flight.pop(result.step_id, None)
        self._count(result)
        if plan is None:  # discarded because an earlier step failed
            return []
        if result.error is not None:
            return self._fail(plan, result.error)
        by_id = {r.seq_id: r for r in result.seqs}
        outputs: list[SeqOutput] = []
        seqs = self._state.seqs
        for step in plan.seqs:
            seq = seqs.get(step.seq_id)
            if seq is None:
                continue
            seq.in_flight -= 1
            sampled = by_id.get(step.seq_id)
            if seq.prompt_logprobs is not None and sampled is not None and sampled.prompt_logprobs:
                self._collect_prompt_logprobs(seq, step, sampled)
            seq.pending -= step.sample
            if step.sample or (sampled is not None and sampled.error is not None):
                self._commit_seq(seq, step, sampled, outputs)
        return outputs

    def _count(self, result: StepResult) -> None:
        counters, (forward_bytes, back_bytes) = self._state.counters, result.stage_bytes
        counters.encode_s += result.encode_s
        counters.stage_forward_bytes += forward_bytes
        counters.stage_back_bytes += back_bytes

    def _commit_seq(self, seq: Sequence, step: SeqStep, sampled: SeqResult | None, outputs: list[SeqOutput]) -> None:
        if sampled is not None and sampled.error is not None:
            outputs += self._state.end_outputs(seq, seq.indices, "error", sampled.error)
            self._state.kv.unregister_exclusive_blocks(seq)
            self._state.encoder.forget(seq)
            self._state.finish(seq)
            return
        if seq.pooling is not None and sampled is not None:
            outputs.append(self._end_pooled(seq, sampled))
            return
        tokens = [] if sampled is None else sampled.token_ids
        is_first = seq.num_output == 0
        if step.draft_token_ids and tokens:
            self._count_drafts(len(step.draft_token_ids), num_accepted=len(tokens) - 1)
        count, stop = _append_tokens(seq, tokens)
        if seq.status == "preempted":
            self._state.num_waiting_tokens += count
        elif seq.pending and len(seq.token_ids) % self._state.config.block_size == 0:
            self._state.kv.register_full(seq, len(seq.token_ids))  # a plan in flight fills the block
        if count != 1 or step.draft_token_ids:
            self._rewind(seq)
        if not count:
            return
        if is_first:
            self._count_first_token(seq)
        self._state.count_generated(count, seq)
        output = SeqOutput(
            request_id=seq.request_id,
            index=seq.indices[0],
            token_ids=tokens[:count],
            num_cached_tokens=seq.num_cached,
            num_preemptions=seq.num_preemptions,
        )
        if sampled is not None and sampled.logprobs is not None:
            output.logprobs = sampled.logprobs[:count]
        if seq.prompt_logprobs is not None:
            output.prompt_logprobs, seq.prompt_logprobs = seq.prompt_logprobs, None
        outputs.append(output)
        if stop[0] is not None:
            self._end(seq, output, stop)

    def _count_drafts(self, num_drafts: int, *, num_accepted: int) -> None:
        counters = self._state.counters
        counters.drafts += 1
        counters.draft_tokens += num_drafts
        accepted = counters.accepted_draft_tokens
        accepted += [0] * (num_drafts - len(accepted))
        for position in range(num_accepted):
            accepted[position] += 1

    def _rewind(self, seq: Sequence) -> None:
        """Set `computed` to the accepted tokens without the newest, whose KV the sequence's next step computes."""
        if seq.status == "running":
            seq.computed = len(seq.token_ids) - 1
            self._state.kv.register_full(seq, seq.computed)
        else:
            seq.saved = min(seq.saved, len(seq.token_ids) - 1)

    def _count_first_token(self, seq: Sequence) -> None:
        seq.first_token_s = self._state.now
        self._state.counters.batched_tokens += 1  # the step computed the prompt and generated a token besides
        if seq.key[-1] == 0:  # the sequence that computed the prompt
            self._state.count_prompt(seq.num_prompt, seq)

    def _end_pooled(self, seq: Sequence, pooled: SeqResult) -> SeqOutput:
        self._state.count_prompt(seq.num_prompt, seq)
        output = SeqOutput(
            request_id=seq.request_id,
            index=seq.indices[0],
            num_cached_tokens=seq.num_cached,
            num_preemptions=seq.num_preemptions,
            embedding=pooled.embedding,
        )
        self._end(seq, output, ("stop", None))
        return output

    def _end(self, seq: Sequence, output: SeqOutput, stop: Stop) -> None:
        output.finish_reason, output.stop_reason = stop
        output.timing = seq.timing(self._state.now)
        self._state.finish(seq)

    def _collect_prompt_logprobs(self, seq: Sequence, step: SeqStep, sampled: SeqResult) -> None:
        """Append a step's prompt log-probabilities: row i is for the prompt token at position step.start + i + 1. Rows
        that were already collected before a preemption are skipped.
        """
        collected = seq.prompt_logprobs
        assert collected is not None
        assert sampled.prompt_logprobs is not None
        collected += sampled.prompt_logprobs[max(len(collected) - step.start - 1, 0) :]

    def _fail(self, plan: StepPlan, error: str) -> list[SeqOutput]:
        """End the sequences of the failed step; all other sequences are recomputed, as the KV memory may be corrupt.

        Sequences that this plan and plans in flight list as dropped are listed again, because the runner may not have
        dropped them.
        """
        state = self._state
        failed = [plan, *state.in_flight.values()]
        state.dropped += [seq_id for each in failed for seq_id in each.dropped_seqs]
        state.encoder.forget_all(failed)
        outputs: list[SeqOutput] = []
        for seq in [state.seqs[s.seq_id] for s in plan.seqs if s.seq_id in state.seqs]:
            outputs += state.end_outputs(seq, seq.indices, "error", ErrorInfo(error))
            state.finish(seq)
        for seq in [*state.running]:
            state.preempt(seq, swap=False)
        for seq in state.waiting:
            seq.in_flight = seq.pending = 0
            seq.saved = min(seq.saved, len(seq.token_ids) - 1)
            state.kv.forget_private(seq)
        state.in_flight.clear()
        state.kv.forget_contents()
        return outputs


def _append_tokens(seq: Sequence, sampled: list[int]) -> tuple[int, Stop]:
    """Append tokens up to the first that ends the sequence; return their number, the finish reason and stop id.

    If a token both stops generation and reaches a length limit, the reason is "stop", as clients expect. Before
    `min_tokens` no token stops generation, but the length limits always hold.
    """
    for count, token in enumerate(sampled, start=1):
        seq.token_ids.append(token)
        stop = _stop_after(seq, token)
        if stop is not NOT_STOPPED:
            return count, stop
    return len(sampled), NOT_STOPPED


def _stop_after(seq: Sequence, token: int) -> Stop:
    length = len(seq.token_ids)
    if length >= seq.min_total:
        if token == seq.eos_token_id:
            return "stop", None
        if token in seq.stop_token_ids:
            return "stop", token
    return ("length", None) if length >= seq.limit else NOT_STOPPED
