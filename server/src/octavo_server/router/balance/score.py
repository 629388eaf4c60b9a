"""What sending a request to a replica would cost: seconds to its first token, by what they are spent on. Pure.

Prompt tokens not in the cache, tokens of others that come first, blocks that others have to give back, and the decoding
that shares the steps all become seconds by the rate learned of that replica. Whoever waits for a token waits alone, but
a token that is computed holds up everybody there: so that delay of others is a cost, too. Without it each request
would leave its prefix for a shorter queue, and all would wait longer for what is then computed twice.

What every replica would need alike (the step of the first token itself) isn't counted: ties are ties of what differs.
"""

from typing import TYPE_CHECKING

from octavo_server.router.balance.decision import CandidateCost

if TYPE_CHECKING:
    from octavo_server.router.fleet.prefix_index import Match
    from octavo_server.router.fleet.replica import Replica
    from octavo_server.router.prompts.prompt import Prompt

HOST_SHARE = 0.75  # of a block's prefill is saved by finding it in host memory
EXPECTED_OUTPUT_TOKENS = 128
CHUNK_TOKENS = 2048  # of prefill in a step; whoever decodes shares each of them
DELAYED_SHARE = 0.25  # of a second for the first token: what a second's delay of one that decodes counts as
MAX_DELAYED = 12  # who count: beyond, a full cache would outweigh any queue
TIE = 0.05


def expected_tokens(prompt: "Prompt", match: "Match") -> int:
    """Prompt tokens that the replica wouldn't compute; the last one always is."""
    return max(min(match.blocks * prompt.block_size, prompt.num_tokens - 1), 0)


def terms(prompt: "Prompt", replica: "Replica", match: "Match", token_s: float) -> CandidateCost:
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
    """To be computed before a new request's turn.

    The reported backlog counts the whole prompt of one that waits; what they will find cached is known of our own.
    """
    activity = replica.activity
    own_tokens = activity.pending_tokens + activity.failed_tokens
    if not replica.is_exact:
        return own_tokens
    load = replica.load
    queued = float(load.prefill_backlog_tokens)
    if load.waiting:
        queued = max(queued - load.waiting_cached_tokens, load.waiting)
    return queued + own_tokens


def num_decoding(replica: "Replica") -> int:
    """Of a blind one, those of our own that have begun to answer."""
    activity = replica.activity
    return replica.load.running if replica.is_exact else activity.num_in_flight - activity.num_unanswered


def num_requests(replica: "Replica") -> int:
    """That it has to do with. What a blind one says of its load is seconds old: ours may be in it or not."""
    activity, load = replica.activity, replica.load
    pending = activity.num_pending if replica.is_exact else 0
    return max(load.running + load.waiting + pending, activity.num_in_flight) + activity.num_failed


def _shortage_s(prompt: "Prompt", replica: "Replica", match: "Match", token_s: float) -> float:
    """Until others have given back the blocks that the request needs and nobody has to spare.

    Requests give back all that is in use once in the time that one of them takes; before one of ours has ended that
    isn't known, and the blocks count as if they had to be computed anew.
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
    if in_use > 0 and (hold_s := replica.activity.hold_s):
        return missing * hold_s / in_use
    return missing * prompt.block_size * token_s
