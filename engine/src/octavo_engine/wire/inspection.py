"""Calls to a running engine core that belong to no request, and their answers."""

from dataclasses import dataclass
from typing import Literal

CallName = Literal["probe", "debug_requests", "reset_prefix_cache", "reset_mm_cache", "sleep", "wake_up"]
AdapterCallName = Literal["load_adapter", "end_load", "unload_adapter"]
SequenceState = Literal["deferred", "waiting", "running", "preempted"]


@dataclass(slots=True, kw_only=True)
class SequenceInfo:
    """One unfinished sequence in the scheduler, without its text. Times are by the engine core's clock.

    `indices`: the outputs that the sequence stands for; several until the prompt is computed.
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


Answer = bool | str | list[SequenceInfo]
