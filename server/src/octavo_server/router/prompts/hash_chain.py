"""`PromptHashCache` maps a text to its block hashes. A beginning that an earlier text has too is not tokenised again.

A text is cut into pieces where cutting is safe, and each piece leads from one node to the next. A known piece costs one
look-up. The last piece of a prompt ends where the text does, not at a cut, so a longer prompt has another piece there.
The last piece is therefore not cached, and requests that differ only in their last message add no entries.
"""

import itertools
import sys
from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from octavo_engine.text.split_points import SafeSplitter
from octavo_engine.text.tokenizer import Tokenizer
from octavo_engine.wire.hashing import HASH_BYTES, SHORT_BYTES, chained_hashes

from octavo_server.router.prompts.two_queue_cache import TwoQueueCache

#: Memory in bytes that a node takes for each block that its piece completes.
BLOCK_BYTES = 8
#: New pieces of up to this length in total are tokenised part by part, with a cache of parts.
SHORT_CHARS = 1024
MAX_KNOWN_PARTS = 16384
#: Longer parts are not cached: they seldom recur, and 16384 of them would take too much memory.
KNOWN_CHARS = 64
#: With more uncached parts in a text, tokenising the whole text at once is faster.
MAX_NEW_PARTS = 8
#: Pieces in one call of the tokenizer, which holds the GIL while it converts the results of a call.
BATCH_PIECES = 256


_TOKEN_BYTES = 4
_NOTHING = array("Q")
_ids = itertools.count()


class Node(NamedTuple):  # constructed twice as fast as a frozen dataclass
    """Hashing state after a piece of text. `last`: full hash of the last block. `rest`: tokens after that, as
    little-endian u32. `hashes`: short hashes of the piece's blocks, in one array, as freeing hundreds of objects
    that are in no CPU cache is slow.
    """

    id: int
    num_tokens: int
    last: bytes
    rest: bytes = b""
    hashes: Sequence[int] = _NOTHING


def root_node(root: bytes) -> Node:
    return Node(next(_ids), 0, root)


def extend_node(node: Node, steps: Sequence[list[int]], block_size: int) -> list[Node]:
    """Append the tokens of each step; return the node after each step. Raises OverflowError for an invalid token id."""
    data = node.rest + _packed(steps)
    hashes = chained_hashes(node.last, data, block_size)
    shorts = _shorts(hashes)
    nodes, start, num_blocks = [], len(node.rest) // _TOKEN_BYTES, 0
    num_before = node.num_tokens - start
    for step in steps:
        start += len(step)
        done, num_blocks = num_blocks, start // block_size
        last = hashes[num_blocks - 1] if num_blocks else node.last
        rest = data[num_blocks * block_size * _TOKEN_BYTES : start * _TOKEN_BYTES]
        nodes.append(Node(next(_ids), num_before + start, last, rest, shorts[done:num_blocks]))
    return nodes


def _shorts(hashes: list[bytes]) -> Sequence[int]:
    numbers = array("Q", b"".join(hashes))
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers[:: HASH_BYTES // SHORT_BYTES]


def _packed(steps: Iterable[list[int]]) -> bytes:
    """Pack the tokens as little-endian u32. `array.fromlist` is over twice as fast as `struct`."""
    tokens = array("I")
    for step in steps:
        tokens.fromlist(step)
    if sys.byteorder == "big":
        tokens.byteswap()
    return tokens.tobytes()


class PromptHashCache:
    def __init__(self, tokenizer: Tokenizer, splitter: SafeSplitter, *, block_size: int, max_bytes: int) -> None:
        self._tokenizer = tokenizer
        self._splitter = splitter
        self._block_size = block_size
        self._nodes: TwoQueueCache[tuple[int, str], Node] = TwoQueueCache(max_bytes)
        self._roots: TwoQueueCache[tuple[bytes, bool], Node] = TwoQueueCache(max_bytes // 16)
        self._known_parts: dict[str, list[int]] = {}
        self._frame = tokenizer.special_frame

    @property
    def num_bytes(self) -> int:
        return self._nodes.num_bytes

    def hashes(self, root: bytes, text: str, *, add_special_tokens: bool) -> tuple[Sequence[int], int]:
        hashes: list[int] = []
        if not add_special_tokens:
            node = self._hash_pieces(self._root(root), self._splitter.split(text), hashes)
        elif self._frame is None:
            node = self._append(self._root(root), self._tokenizer.encode(text), hashes)
        else:
            before, after = self._frame
            node = self._root(root, before)
            hashes += node.hashes
            node = self._hash_pieces(node, self._splitter.split(text), hashes)
            node = self._append(node, after, hashes) if after else node
        return hashes, node.num_tokens

    def hashes_of_ids(self, root: bytes, token_ids: list[int]) -> tuple[Sequence[int], int]:
        """Block hashes and number of the given tokens. Raises OverflowError for an invalid token id."""
        (node,) = extend_node(self._root(root), [token_ids], self._block_size)
        return list(node.hashes), node.num_tokens

    def _root(self, root: bytes, first: list[int] | None = None) -> Node:
        """Return the node before any token, or after `first`, the special tokens that begin every prompt."""
        key = (root, bool(first))
        node = self._roots.get(key)
        if node is None:
            node = root_node(root)
            if first:
                (node,) = extend_node(node, [first], self._block_size)
            self._roots.put(key, node, len(root))
        return node

    def _hash_pieces(self, node: Node, pieces: list[str], hashes: list[int]) -> Node:
        """Append the block hashes of the pieces to `hashes` and return the last node. The last piece is not cached."""
        num_known = 0
        for piece in pieces:
            known = self._nodes.get((node.id, piece))
            if known is None:
                break
            node = known
            hashes += node.hashes
            num_known += 1
        new = pieces[num_known:]
        steps = extend_node(node, self._token_ids(new), self._block_size) if new else []
        for piece, parent, child in zip(new, (node, *steps), steps, strict=False):
            hashes += child.hashes
            if child is not steps[-1]:
                self._nodes.put((parent.id, piece), child, sys.getsizeof(piece) + BLOCK_BYTES * len(child.hashes))
        return steps[-1] if steps else node

    def _token_ids(self, pieces: list[str]) -> list[list[int]]:
        if sum(map(len, pieces)) <= SHORT_CHARS:
            return [self._short_ids(piece) for piece in pieces]
        ids: list[list[int]] = []
        for start in range(0, len(pieces), BATCH_PIECES):
            ids += self._tokenizer.encode_each(pieces[start : start + BATCH_PIECES], add_special_tokens=False)
        return ids

    def _short_ids(self, text: str) -> list[int]:
        """Tokenise a short text part by part. The parts are cached: markup around messages and most words recur."""
        parts, known = self._splitter.parts(text), self._known_parts
        new = [part for part in parts if part not in known]
        if not new:
            return [token_id for part in parts for token_id in known[part]]
        if len(known) > MAX_KNOWN_PARTS:
            self._known_parts = known = {part: known[part] for part in parts if part in known}
        learned, rest = new[:MAX_NEW_PARTS], [text] if len(new) > MAX_NEW_PARTS else []
        ids = self._tokenizer.encode_each(learned + rest, add_special_tokens=False)
        known |= ((part, of_part) for part, of_part in zip(learned, ids, strict=False) if len(part) <= KNOWN_CHARS)
        if rest:
            return ids[-1]
        new_ids = dict(zip(new, ids, strict=False))
        return [token_id for part in parts for token_id in (new_ids[part] if part in new_ids else known[part])]

    def _append(self, node: Node, token_ids: list[int], hashes: list[int]) -> Node:
        (node,) = extend_node(node, [token_ids], self._block_size)
        hashes += node.hashes
        return node
