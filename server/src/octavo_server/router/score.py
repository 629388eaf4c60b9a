"""What sending a request to a replica would cost: seconds to its first token, by what they are spent on. Pure.

No weights: prompt tokens not in the cache, tokens of others that come first, blocks that somebody would have to give
up, and the decoding that shares the steps all become seconds by the rates learned of that replica. What every replica
would need alike (the step of the first token itself) isn't counted, so that ties are ties of what differs.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo_server.router.decision import Terms

if TYPE_CHECKING:
    from octavo_server.router.prefix_index import Match
    from octavo_server.router.prompt import Prompt
    from octavo_server.router.replica import Replica

HOST_SHARE = 0.75  # of a block's prefill is saved by finding it in host memory
EXPECTED_OUTPUT_TOKENS = 128
TIE = 0.05


@dataclass(frozen=True, slots=True)
class Work:
    """What a replica has to do before a new request's turn."""

    queued_tokens: float  # reported, and sent since
    num_decoding: int
    free_blocks: int | None  # None: not known


def expected_tokens(prompt: "Prompt", match: "Match") -> int:
    """Prompt tokens that the replica wouldn't compute; the last one always is."""
    return max(min(match.blocks * prompt.block_size, prompt.num_tokens - 1), 0)


def missing_blocks(prompt: "Prompt", match: "Match", free_blocks: int) -> int:
    """Blocks that the request needs beyond those that nobody uses."""
    output = min(prompt.max_tokens or EXPECTED_OUTPUT_TOKENS, EXPECTED_OUTPUT_TOKENS) * prompt.num_outputs
    needed = -(-(prompt.num_tokens + output) // prompt.block_size) - match.device
    return max(needed - free_blocks, 0)


def is_tied(cost_s: float, best_s: float) -> bool:
    return cost_s <= best_s * (1 + TIE)


def terms(prompt: "Prompt", replica: "Replica", match: "Match", work: Work) -> Terms:
    rates = replica.activity.rates
    recalled = (1 - HOST_SHARE) * match.host * prompt.block_size
    compute = prompt.num_tokens - expected_tokens(prompt, match) + recalled
    missing = 0 if work.free_blocks is None else missing_blocks(prompt, match, work.free_blocks)
    return Terms(
        replica=replica,
        match=match,
        prefill_s=compute * rates.token_s,
        queue_s=work.queued_tokens * rates.token_s,
        evict_s=missing * prompt.block_size * rates.token_s,
        decode_s=work.num_decoding * rates.token_s,
    )
