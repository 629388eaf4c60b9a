"""`Node`: a beginning of a prompt as its block hashes see it. From a node the hashes of any longer prompt go on.

Nodes don't change and don't know each other; who keeps them (`PromptChains`) does. A node has the hashes of its own
blocks only, those that its last step completed.
"""

import itertools
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from octavo_engine.wire.hashing import SHORT_BYTES, chained_hashes

_TOKEN_BYTES = 4
_ids = itertools.count()


@dataclass(frozen=True, slots=True)
class Node:
    """`rest`: the tokens behind the last full block, as little-endian u32. `hashes`: short ones, as numbers."""

    id: int
    num_tokens: int
    last: bytes
    rest: bytes = b""
    hashes: tuple[int, ...] = ()


def root_node(root: bytes) -> Node:
    return Node(next(_ids), 0, root)


def extended(node: Node, token_ids: Sequence[int], block_size: int) -> Node:
    data = node.rest + struct.pack(f"<{len(token_ids)}I", *token_ids)
    hashes = chained_hashes(node.last, data, block_size)
    rest = data[len(hashes) * block_size * _TOKEN_BYTES :]
    shorts = struct.unpack(f"<{len(hashes)}Q", b"".join([block_hash[:SHORT_BYTES] for block_hash in hashes]))
    last = hashes[-1] if hashes else node.last
    return Node(next(_ids), node.num_tokens + len(token_ids), last, rest, shorts)
