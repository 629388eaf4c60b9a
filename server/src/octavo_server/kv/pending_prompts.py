"""`PendingPrompts`: requests that came and haven't begun to run: what they will find cached, and what they will have stored.

The engine core looks at a prompt when it is the prompt's turn, which may be seconds from now. Routers want to know at
once: else each of them has the same new prompt computed somewhere, and takes those who wait for more work than they
are. So prompts are hashed here, too, as they come, by the definition that the core goes by. Blocks that they will have
stored are told as *coming*: nothing that is there yet, and never part of the digest.

Who waits isn't told by the core, only how many: it is taken to be those who came last.
"""

from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from msgspec.structs import replace
from octavo_engine.wire.hashing import SHORT_BYTES, block_hashes, scoped_root
from octavo_engine.wire.kv_stream import numbers

if TYPE_CHECKING:
    from octavo_engine.wire.records import EngineRequest

    from octavo_server.kv.frames import ReplicaLoad

MAX_COMING = 2048  # blocks of one prompt, from its beginning


class PendingPrompt(NamedTuple):
    """A prompt. `coming`: its blocks that aren't stored, in their order."""

    num_tokens: int
    cached_tokens: int
    coming: Sequence[int]


class PendingPrompts:
    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._num_added = 0
        self._latest: deque[PendingPrompt] = deque()
        self._coming: dict[int, int] = {}  # block -> of how many of the latest

    def add(self, request: "EngineRequest", blocks: Sequence[int], is_stored: Callable[[int], bool]) -> PendingPrompt:
        """`blocks`: its `full_blocks`; none where nobody asks or nothing is cached."""
        coming = [block for block in blocks if not is_stored(block)]
        new = next((block for block in coming if block not in self._coming), None)
        found = len(blocks) if new is None else blocks.index(new)
        num_tokens = len(request.prompt_token_ids)
        cached_tokens = max(min(found * self._block_size, num_tokens - 1), 0)  # the last one is always computed
        prompt = PendingPrompt(
            num_tokens, cached_tokens if request.params.reads_prefix_cache else 0, coming[:MAX_COMING]
        )
        for block in prompt.coming:
            self._coming[block] = self._coming.get(block, 0) + 1
        self._num_added += 1
        self._latest.append(prompt)
        return prompt

    def add_to_load(self, load: "ReplicaLoad") -> "ReplicaLoad":
        """What the core told of what it has to do, with those in it that it hasn't heard of."""
        num_untold = max(self._num_added - load.received, 0)
        waiting = load.waiting + num_untold
        while len(self._latest) > waiting:
            self._forget(self._latest.popleft())
        if not waiting:
            return load
        untold = islice(reversed(self._latest), num_untold)
        return replace(
            load,
            received=load.received + num_untold,
            waiting=waiting,
            prefill_backlog_tokens=load.prefill_backlog_tokens + sum([prompt.num_tokens for prompt in untold]),
            waiting_cached_tokens=sum([prompt.cached_tokens for prompt in self._latest]),
        )

    def _forget(self, prompt: PendingPrompt) -> None:
        for block in prompt.coming:
            others = self._coming[block] - 1
            if others:
                self._coming[block] = others
            else:
                del self._coming[block]


def full_blocks(request: "EngineRequest", root: bytes, block_size: int) -> tuple[int, ...]:
    """Short hashes of what the engine stores of a prompt. `root`: as in its `hello`."""
    hashes = block_hashes(scoped_root(root, request.adapter, request.cache_salt), request.prompt_token_ids, block_size)
    return numbers(b"".join([block_hash[:SHORT_BYTES] for block_hash in hashes]))
