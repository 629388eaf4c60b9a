"""`Oracle`: an upper bound of the tokens that any placement could find in a cache.

It treats all replicas as one whose cache never evicts: for each prompt it counts the longest run of full blocks in an
earlier prompt, or in an earlier prompt with its answer if that has ended. No policy can find more. Some of it no policy
can find: prefixes of requests that arrive at the same time on two idle replicas, or more prefixes than memory holds.
"""

from octavo_engine.wire.hashing import block_hashes, short_hash

from router_sim.hardware import HASH_ROOT
from router_sim.router_view import BLOCK_SIZE, PolicyRequest
from router_sim.workloads import Request


class Oracle:
    def __init__(self) -> None:
        self._known: set[int] = set()

    def count_findable(self, request: PolicyRequest) -> int:
        """Return the tokens of the prompt that could be found, then add its blocks."""
        blocks = 0
        for block_hash in request.hashes:
            if block_hash not in self._known:
                break
            blocks += 1
        self._known.update(request.hashes)
        return min(blocks * BLOCK_SIZE, request.num_tokens - 1)

    def add_answer(self, request: Request) -> None:
        """Add the blocks of prompt and answer, without the answer's last token, which is never computed."""
        self._known.update(hashes_of((request.prompt + request.answer)[:-1]))


def hashes_of(text: bytes) -> list[int]:
    """Return the short hashes of the text's full blocks, as in frames."""
    return [int.from_bytes(short_hash(h), "little") for h in block_hashes(HASH_ROOT, text, BLOCK_SIZE)]
