"""What a replica tells about its KV blocks: the change that one step made, and the set that a listener keeps.

A block hash travels as its first 8 bytes (`short_hash`), many of them as one bytes object; as a number it is that,
little-endian. The digest of a set is the XOR of its numbers, those of the host tier rotated by 32 bits: it rolls with
each change, doesn't depend on the order, and a listener that computes another one has lost, repeated or misread
something. It guards against accidents, not against a replica that lies on purpose.
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
    """What only the events for others' routers tell of a block that came to the device. Hashes are short."""

    hash: bytes
    parent: bytes | None  # None: the first block of a prompt
    token_ids: list[int]
    salt: str = ""


@dataclass(slots=True, kw_only=True)
class KVChange:
    """The net change of one step, as short hashes run together, and the digest of both sets after it.

    `blocks`: those in `stored`, in an order in which a parent comes before its child; empty unless asked for.
    """

    stored: bytes = b""
    removed: bytes = b""
    host_stored: bytes = b""
    host_removed: bytes = b""
    digest: int = 0
    blocks: list[StoredBlock] = field(default_factory=list)

    def roll(self, digest: int) -> int:
        """The digest after this change, from the one before."""
        digest = roll(digest, "device", (*numbers(self.stored), *numbers(self.removed)))
        return roll(digest, "host", (*numbers(self.host_stored), *numbers(self.host_removed)))


@dataclass(slots=True)
class KVSet:
    """The hashes that a replica has, by tier. `apply` never fails: what went wrong shows in `is_exact`."""

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
    """Raises ValueError unless it is a whole number of hashes."""
    count, rest = divmod(len(hashes), SHORT_BYTES)
    if rest:
        raise ValueError(f"{len(hashes)} bytes are no whole number of {SHORT_BYTES}-byte hashes.")
    return struct.unpack(f"<{count}Q", hashes)


def run_together(hashes: Iterable[int]) -> bytes:
    values = [*hashes]
    return struct.pack(f"<{len(values)}Q", *values)


def roll(digest: int, tier: Tier, hashes: Iterable[int]) -> int:
    """The digest after these entries of one tier came or went."""
    change = reduce(xor, hashes, 0)
    return digest ^ (change if tier == "device" else (change & _LOW_32) << 32 | change >> 32)
