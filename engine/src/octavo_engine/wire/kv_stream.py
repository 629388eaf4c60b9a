"""A replica's reports of its KV blocks: the change made by one step, and the set of hashes that a listener keeps.

A block hash is sent as its first 8 bytes (`short_hash`), several hashes as one bytes object; as a number it is
little-endian. The digest of a set is the XOR of its numbers, those of the host tier rotated by 32 bits: it is updated
with each change and does not depend on the order. A listener that computes a different digest has lost, repeated or
misread a change. The digest detects accidents, not a replica that reports wrong hashes on purpose.
"""

import struct
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import reduce
from operator import xor
from typing import Literal

from octavo_engine.wire.hashing import SHORT_BYTES

Tier = Literal["device", "host"]

_LOW_32 = 0xFFFF_FFFF


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """A block stored on the device, with its tokens, for vLLM-compatible KV events. Both hashes are short (8 bytes).

    `adapter`: hash of the request's adapter. `images`: digest and start, relative to the block, of each image that has
    tokens in the block.
    """

    hash: bytes
    parent: bytes | None  # None: the first block of a prompt
    token_ids: list[int]
    salt: str = ""
    adapter: str = ""
    images: list[tuple[bytes, int]] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class KVChange:
    """The net change of one step, as concatenated short hashes, and the digest of both sets after the change.

    `blocks`: details of the hashes in `stored`, parents before children; empty unless tokens are recorded.
    """

    stored: bytes = b""
    removed: bytes = b""
    host_stored: bytes = b""
    host_removed: bytes = b""
    digest: int = 0
    blocks: list[StoredBlock] = field(default_factory=list)

    def roll(self, digest: int) -> int:
        """Return the digest after this change, given the digest before it."""
        digest = roll(digest, "device", (*numbers(self.stored), *numbers(self.removed)))
        return roll(digest, "host", (*numbers(self.host_stored), *numbers(self.host_removed)))


@dataclass(slots=True)
class KVSet:
    """A replica's hashes by tier. `is_exact` is False if the latest change states another digest than `digest`."""

    device: set[int] = field(default_factory=set)
    host: set[int] = field(default_factory=set)
    digest: int = 0
    is_exact: bool = True

    def has(self, block_hash: int) -> bool:
        return block_hash in self.device or block_hash in self.host

    def apply(self, change: KVChange) -> None:
        device_in, device_out = numbers(change.stored), numbers(change.removed)
        host_in, host_out = numbers(change.host_stored), numbers(change.host_removed)
        self.device.update(device_in)
        self.device.difference_update(device_out)
        self.host.update(host_in)
        self.host.difference_update(host_out)
        self.digest = roll(roll(self.digest, "device", (*device_in, *device_out)), "host", (*host_in, *host_out))
        self.is_exact = self.digest == change.digest


def numbers(hashes: bytes) -> tuple[int, ...]:
    """Split concatenated short hashes into numbers. Raises ValueError if the last hash is incomplete."""
    count, rest = divmod(len(hashes), SHORT_BYTES)
    if rest:
        raise ValueError(f"{len(hashes)} bytes are not a multiple of {SHORT_BYTES}, the length of a hash.")
    return struct.unpack(f"<{count}Q", hashes)


def run_together(hashes: Iterable[int]) -> bytes:
    values = [*hashes]
    return struct.pack(f"<{len(values)}Q", *values)


def roll(digest: int, tier: Tier, hashes: Iterable[int]) -> int:
    """Return the digest after these entries of one tier were stored or removed."""
    change = reduce(xor, hashes, 0)
    return digest ^ (change if tier == "device" else (change & _LOW_32) << 32 | change >> 32)
