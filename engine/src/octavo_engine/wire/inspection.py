"""What an operator may ask a running engine core, and what it answers: calls that take part in no request."""

from dataclasses import dataclass
from typing import Literal

CallName = Literal["debug_requests", "reset_prefix_cache"]
SequenceState = Literal["deferred", "waiting", "running", "preempted"]


@dataclass(slots=True, kw_only=True)
class SequenceInfo:
    """One unfinished sequence as the scheduler sees it, without a word of its text. Times by the engine core's clock.

    `indices`: the outputs that it stands for; more than one until the prompt is computed.
    """

    request_id: str
    indices: list[int]
    state: SequenceState
    waiting_reason: str | None
    prompt_tokens: int
    generated_tokens: int
    computed_tokens: int
    cached_tokens: int
    blocks: int
    preemptions: int
    priority: int
    age_s: float
    queued_s: float


Answer = bool | list[SequenceInfo]
