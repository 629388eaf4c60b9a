"""`PendingPrompts`: requests that were received and don't run yet, with their cached and their coming blocks.

The engine core matches a prompt with the cache at the prompt's turn, which may be seconds later. Routers need the
result at once: otherwise several routers send the same new prompt to different replicas, and overestimate the
work of waiting requests. So the API process hashes prompts as they arrive, with the core's code. The blocks that
they will store are published as *coming*: they don't exist yet and are never part of the digest.

The core reports the number of waiting requests, not which ones wait: the latest ones are assumed to wait.
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

MAX_COMING = 2048  # most coming blocks of one prompt, counted from its beginning


class PendingPrompt(NamedTuple):
    """The prompt of a waiting request. `coming`: its blocks that aren't stored yet, in the prompt's order."""

    num_tokens: int
    cached_tokens: int
    coming: Sequence[int]


class PendingPrompts:
    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._num_added = 0
        self._latest: deque[PendingPrompt] = deque()
        self._coming: dict[int, int] = {}  # block -> number of prompts in `_latest` that will store it

    def add(self, request: "EngineRequest", blocks: Sequence[int], is_stored: Callable[[int], bool]) -> PendingPrompt:
        """Add a request. `blocks`: its `full_blocks`; empty if no router listens or prefixes aren't cached."""
        coming = [block for block in blocks if not is_stored(block)]
        new = next((block for block in coming if block not in self._coming), None)
        num_cached = len(blocks) if new is None else blocks.index(new)
        num_tokens = len(request.prompt_token_ids)
        cached_tokens = max(min(num_cached * self._block_size, num_tokens - 1), 0)  # the last token is always computed
        prompt = PendingPrompt(
            num_tokens, cached_tokens if request.params.reads_prefix_cache else 0, coming[:MAX_COMING]
        )
        for block in prompt.coming:
            self._coming[block] = self._coming.get(block, 0) + 1
        self._num_added += 1
        self._latest.append(prompt)
        return prompt

    def add_to_load(self, load: "ReplicaLoad") -> "ReplicaLoad":
        """Add the requests that the core hasn't received yet to the load that it reported."""
        num_unreceived = max(self._num_added - load.received, 0)
        waiting = load.waiting + num_unreceived
        while len(self._latest) > waiting:
            self._forget(self._latest.popleft())
        if not waiting:
            return load
        unreceived = islice(reversed(self._latest), num_unreceived)
        return replace(
            load,
            received=load.received + num_unreceived,
            waiting=waiting,
            prefill_backlog_tokens=load.prefill_backlog_tokens + sum([prompt.num_tokens for prompt in unreceived]),
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
    """Short hashes of the blocks that the engine stores for a prompt. `root`: the root hash of the `hello` frame."""
    hashes = block_hashes(scoped_root(root, request.adapter, request.cache_salt), request.prompt_token_ids, block_size)
    return numbers(b"".join([block_hash[:SHORT_BYTES] for block_hash in hashes]))
