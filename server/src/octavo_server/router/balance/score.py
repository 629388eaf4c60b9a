"""Estimates the cost of sending a request to a replica: seconds to its first token, by cause. Pure.

Prompt tokens that aren't cached, queued tokens of other requests, blocks that other requests must release first, and
requests that decode in the same steps are converted to seconds with the replica's fitted time per token. Waiting delays
one request, but each computed token delays every request on the replica, so the delay of other requests is part of the
cost. Else each request would leave its cached prefix for a shorter queue, and all would wait for blocks computed twice.

The estimate leaves out the step of the first token, which takes equally long on all replicas: costs are compared
without it, also for a tie.
"""

from typing import TYPE_CHECKING

from octavo_server.router.balance.decision import CandidateCost

if TYPE_CHECKING:
    from octavo_server.router.fleet.prefix_index import Match
    from octavo_server.router.fleet.replica import Replica
    from octavo_server.router.prompts.prompt import Prompt

#: Share of a block's prefill time that is saved if the block is in host memory.
HOST_SHARE = 0.75
#: Assumed prefill tokens of one step. Decoding requests take part in each step.
CHUNK_TOKENS = 2048
#: A second's delay of one decoding request counts as this many seconds to the first token.
DELAYED_SHARE = 0.25
#: At most this many delayed requests count: with more, cached blocks would outweigh a queue of any length.
MAX_DELAYED = 12
#: Costs up to this share above the least cost count as equal.
TIE = 0.05


def expected_tokens(prompt: "Prompt", match: "Match") -> int:
    """Prompt tokens that the replica would find cached. The last token is always computed."""
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
    """Prompt tokens to be computed before a new request: the reported backlog and this router's unreported requests.

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
    """Number of decoding requests. Unless the replica is exact, only this router's count, from their first byte on."""
    local_load = replica.local_load
    return replica.load.running if replica.is_exact else local_load.num_in_flight - local_load.num_unanswered


def num_requests(replica: "Replica") -> int:
    """Number of requests at the replica: the larger of the reported one and this router's, as reports may be late."""
    local_load, load = replica.local_load, replica.load
    pending = local_load.num_pending if replica.is_exact else 0
    return max(load.running + load.waiting + pending, local_load.num_in_flight) + local_load.num_failed


def _shortage_s(prompt: "Prompt", replica: "Replica", match: "Match", token_s: float) -> float:
    """Seconds until other requests have released the blocks that this request needs beyond the free ones.

    The estimate assumes that all blocks in use are released within the mean duration of a response (`hold_s`). While
    that duration is unknown, a missing block costs as much as its prefill.
    """
    load = replica.load
    free = load.free_blocks + load.cached_blocks
    needed = -(-(prompt.num_tokens + prompt.expected_output_tokens) // prompt.block_size) - match.device
    if needed <= free and not load.waiting:
        return 0.0
    needed += load.prefill_backlog_tokens // prompt.block_size
    missing, in_use = needed - free, load.total_blocks - free
    if missing <= 0:
        return 0.0
    if in_use > 0 and (hold_s := replica.local_load.hold_s):
        return missing * hold_s / in_use
    return missing * prompt.block_size * token_s
