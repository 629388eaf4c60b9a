"""Describes the unfinished sequences: first the running, then the waiting, then the deferred sequences."""

from octavo_engine.core.scheduler import Scheduler
from octavo_engine.core.sequence import Sequence
from octavo_engine.wire.inspection import SequenceInfo


def describe_sequences(scheduler: Scheduler, now: float) -> list[SequenceInfo]:
    return [_describe(seq, scheduler, now) for seq in scheduler.sequences()]


def _describe(seq: Sequence, scheduler: Scheduler, now: float) -> SequenceInfo:
    assert seq.status != "finished"
    has_run = seq.num_cached >= 0
    return SequenceInfo(
        request_id=seq.request_id,
        indices=list(seq.indices),
        state=seq.status,
        waiting_reason=None if seq.status == "running" else scheduler.waiting_reason(seq.request_id),
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
