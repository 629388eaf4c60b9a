"""Estimates the cost of sending a request to a replica: seconds to its first token, by cause. Pure.

Prompt tokens not in the cache, queued tokens of other requests, blocks that other requests must release first, and
decoding in the same steps all become seconds by the replica's fitted time per token. Waiting delays one request, but
each computed token delays every request on the replica, so the delay of others is part of the cost. Without it each
request would leave its prefix for a shorter queue, and all requests would wait longer for blocks computed twice.

The estimate leaves out the time that is equal on all replicas (the step of the first token): a tie is a tie of the
differences.
"""

from typing import TYPE_CHECKING

from octavo_server.router.balance.decision import CandidateCost

if TYPE_CHECKING:
    from octavo_server.router.fleet.prefix_index import Match
    from octavo_server.router.fleet.replica import Replica
    from octavo_server.router.prompts.prompt import Prompt

#: A block in host memory saves this share of its prefill.
HOST_SHARE = 0.75
EXPECTED_OUTPUT_TOKENS = 128
#: Prefill tokens of one step. Decoding requests take part in each step.
CHUNK_TOKENS = 2048
#: A second's delay of one decoding request counts as this many seconds to the first token.
DELAYED_SHARE = 0.25
#: At most this many delayed requests count: beyond, a full cache would outweigh any queue.
MAX_DELAYED = 12
#: Costs within this share of the least cost are a tie.
TIE = 0.05


def expected_tokens(prompt: "Prompt", match: "Match") -> int:
    """Prompt tokens that the replica would not compute. The last token is always computed."""
    return max(min(match.blocks * prompt.block_size, prompt.num_tokens - 1), 0)


def estimate_cost(prompt: "Prompt", replica: "Replica", match: "Match", token_s: float) -> CandidateCost:
    compute = float(prompt.num_tokens - expected_tokens(prompt, match))
    if match.host:
        compute += (1 - HOST_SHARE) * match.host * prompt.block_size
    queued = queued_tokens(replica)
    num_steps = 1 + (queued + compute) // CHUNK_TOKENS
    decoding = num_decoding(replica)
    return CandidateCost(
        replica,
        match,
        compute * token_s,
        queued * token_s,
        _shortage_s(prompt, replica, match, token_s) if replica.is_exact else 0.0,
        decoding * num_steps * token_s,
        DELAYED_SHARE * min(decoding, MAX_DELAYED) * compute * token_s,
    )


def queued_tokens(replica: "Replica") -> float:
    """Prompt tokens to be computed before a new request's turn: the reported backlog and this router's own requests.

    The reported backlog counts whole prompts of waiting requests, so their cached tokens are subtracted.
    """
    local_load = replica.local_load
    own_tokens = local_load.pending_tokens + local_load.failed_tokens
    if not replica.is_exact:
        return own_tokens
    load = replica.load
    queued = float(load.prefill_backlog_tokens)
    if load.waiting:
        queued = max(queued - load.waiting_cached_tokens, load.waiting)
    return queued + own_tokens


def num_decoding(replica: "Replica") -> int:
    """Decoding requests. For a blind replica only requests of this router count, from their first byte on."""
    local_load = replica.local_load
    return replica.load.running if replica.is_exact else local_load.num_in_flight - local_load.num_unanswered


def num_requests(replica: "Replica") -> int:
    """Requests at the replica. A blind replica's load is seconds old and may include this router's requests or not."""
    local_load, load = replica.local_load, replica.load
    pending = local_load.num_pending if replica.is_exact else 0
    return max(load.running + load.waiting + pending, local_load.num_in_flight) + local_load.num_failed


def _shortage_s(prompt: "Prompt", replica: "Replica", match: "Match", token_s: float) -> float:
    """Seconds until other requests have released the blocks that this request needs and that are not free.

    All blocks in use are released once within the mean duration of a response (`hold_s`). While that duration is
    unknown, a missing block costs as much as its prefill.
    """
    load = replica.load
    free = load.free_blocks + load.cached_blocks
    output = min(prompt.max_tokens or EXPECTED_OUTPUT_TOKENS, EXPECTED_OUTPUT_TOKENS) * prompt.num_outputs
    needed = -(-(prompt.num_tokens + output) // prompt.block_size) - match.device
    if needed <= free and not load.waiting:
        return 0.0
    needed += load.prefill_backlog_tokens // prompt.block_size
    missing, in_use = needed - free, load.total_blocks - free
    if missing <= 0:
        return 0.0
    if in_use > 0 and (hold_s := replica.local_load.hold_s):
        return missing * hold_s / in_use
    return missing * prompt.block_size * token_s
