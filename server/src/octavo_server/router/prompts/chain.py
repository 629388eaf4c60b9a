"""`Node`: a beginning of a prompt as its block hashes see it. From a node the hashes of any longer prompt go on.

Nodes don't change and don't know each other; who keeps them (`PromptHashCache`) does. A node has the hashes of its own
blocks only, those that its last step completed.
"""

import itertools
import sys
from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from octavo_engine.wire.hashing import HASH_BYTES, SHORT_BYTES, chained_hashes

_TOKEN_BYTES = 4
_NOTHING = array("Q")
_ids = itertools.count()


class Node(NamedTuple):  # which is made twice as fast as a frozen dataclass
    """`rest`: the tokens behind the last full block, as little-endian u32. `hashes`: short ones, as numbers; in one
    piece of memory, as hundreds of objects are slow to let go of once they are no longer in any cache of the CPU.
    """

    id: int
    num_tokens: int
    last: bytes
    rest: bytes = b""
    hashes: Sequence[int] = _NOTHING


def root_node(root: bytes) -> Node:
    return Node(next(_ids), 0, root)


def extended(node: Node, steps: Sequence[list[int]], block_size: int) -> list[Node]:
    """By the tokens of each step, one after the other: hashed in one go. Raises OverflowError for what is no token."""
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
    """As little-endian u32. An array takes a list over twice as fast as `struct` does."""
    tokens = array("I")
    for step in steps:
        tokens.fromlist(step)
    if sys.byteorder == "big":
        tokens.byteswap()
    return tokens.tobytes()
