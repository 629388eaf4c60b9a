"""`Oracle`: the most tokens that any placement could have found in a cache.

As if all replicas were one whose cache never forgets: of each prompt the longest run of full blocks that an earlier
prompt has, or a prompt with its answer if that had ended by then. No policy can find more. Some of it can't be found by
any: two that come at once, on an idle replica each, or more prefixes than there is memory.
"""

from octavo_engine.wire.hashing import block_hashes, short_hash

from router_sim.hardware import HASH_ROOT
from router_sim.router_view import BLOCK_SIZE, PolicyRequest
from router_sim.workloads import Request


class Oracle:
    def __init__(self) -> None:
        self._known: set[int] = set()

    def count_findable(self, request: PolicyRequest) -> int:
        """Tokens that could be found; from now on this prompt's blocks can be."""
        blocks = 0
        for block_hash in request.hashes:
            if block_hash not in self._known:
                break
            blocks += 1
        self._known.update(request.hashes)
        return min(blocks * BLOCK_SIZE, request.num_tokens - 1)

    def add_answer(self, request: Request) -> None:
        """The last token of an answer is never computed."""
        self._known.update(hashes_of((request.prompt + request.answer)[:-1]))


def hashes_of(text: bytes) -> list[int]:
    """As they go over the wire."""
    return [int.from_bytes(short_hash(h), "little") for h in block_hashes(HASH_ROOT, text, BLOCK_SIZE)]
