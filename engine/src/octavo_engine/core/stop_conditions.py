"""Decides which sampled tokens are appended to a sequence and whether they end it.

If a token both stops generation and reaches a length limit, the reason is "stop", as clients expect. Before
`min_tokens` no token stops generation, but the length limits always hold.
"""

from octavo_engine.core.sequence import Sequence
from octavo_engine.wire.records import FinishReason

Stop = tuple[FinishReason | None, int | None]
NOT_STOPPED: Stop = (None, None)


def append_tokens(seq: Sequence, sampled: list[int]) -> tuple[int, Stop]:
    """Append tokens up to the first that ends the sequence; return their number, the finish reason and stop id."""
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
