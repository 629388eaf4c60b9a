"""Responses of `/debug/decisions` and `/debug/index`. They contain sizes and times, never a prompt."""

from typing import TYPE_CHECKING

import msgspec

from octavo_server.router.observe.state import IndexInfo, ReplicaState

if TYPE_CHECKING:
    from octavo_server.router.balance.decision import CandidateCost
    from octavo_server.router.observe.decision_log import Entry


class Candidate(msgspec.Struct, kw_only=True):
    """A candidate of a decision. `cost_s`: sum of the other times. `delay_s`: the delay of other requests."""

    replica: str
    matched_blocks: int
    host_blocks: int
    predicted_blocks: int
    prefill_s: float
    queue_s: float
    evict_s: float
    decode_s: float
    delay_s: float
    cost_s: float


class DecisionInfo(msgspec.Struct, kw_only=True):
    """`cached_tokens`: number that the engine reported, or null. `number`: position of the decision among those of
    `worker` that have ended, in the order of their ends; 0 while it hasn't ended.
    """

    worker: str
    number: int

    at_s: float
    request_id: str
    attempt: int
    model: str
    prompt_tokens: int
    prompt_blocks: int
    is_exact: bool
    rung: str
    why: str
    chosen: str
    expected_tokens: int
    cached_tokens: int | None
    decision_s: float
    ttft_s: float | None
    code: int | None
    ended: str | None
    candidates: list[Candidate]


class Decisions(msgspec.Struct):
    """`/debug/decisions` lists the newest first, `/debug/decisions/ended` each worker's in the order of their end."""

    decisions: list[DecisionInfo]


class IndexDebug(msgspec.Struct):
    index: IndexInfo
    replicas: list[ReplicaState]


def decision_info(entry: "Entry", at_s: float, worker: str) -> DecisionInfo:
    """`at_s`: time of the decision in seconds since the epoch."""
    decision = entry.decision
    return DecisionInfo(
        worker=worker,
        number=entry.number,
        at_s=at_s,
        request_id=entry.request_id,
        attempt=entry.attempt,
        model=entry.model,
        prompt_tokens=entry.num_prompt_tokens,
        prompt_blocks=entry.num_prompt_blocks,
        is_exact=entry.is_exact,
        rung=decision.rung,
        why=decision.why,
        chosen=decision.chosen.name,
        expected_tokens=decision.expected_tokens,
        cached_tokens=entry.cached_tokens,
        decision_s=entry.decision_s,
        ttft_s=entry.ttft_s,
        code=entry.code,
        ended=entry.reason,
        candidates=[_candidate(terms) for terms in decision.candidates],
    )


def _candidate(terms: "CandidateCost") -> Candidate:
    match = terms.match
    return Candidate(
        replica=terms.replica.name,
        matched_blocks=match.blocks,
        host_blocks=match.host,
        predicted_blocks=match.predicted,
        prefill_s=terms.prefill_s,
        queue_s=terms.queue_s,
        evict_s=terms.evict_s,
        decode_s=terms.decode_s,
        delay_s=terms.delay_s,
        cost_s=terms.cost_s,
    )
