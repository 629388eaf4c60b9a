"""Net changes of the KV cache since the last `drain`: the source of the KV stream.

The pools report a hash when its first copy in a tier appears and when its last copy is removed. Only the net change is
kept (a store and a removal cancel out), so a record has at most the hashes cached before and now.
"""

from dataclasses import dataclass, field

from octavo_engine.core.sequence import Sequence
from octavo_engine.wire.hashing import short_hash
from octavo_engine.wire.kv_stream import KVChange, StoredBlock, Tier, numbers, roll


@dataclass(frozen=True, slots=True)
class KVDelta:
    """The net change since the last `drain`. `digest` covers all hashes stored after it (see `wire.kv_stream`)."""

    stored: list[tuple[Tier, bytes]] = field(default_factory=list)
    removed: list[tuple[Tier, bytes]] = field(default_factory=list)
    digest: int = 0
    blocks: list[StoredBlock] = field(default_factory=list)

    def change(self) -> KVChange | None:
        """Return the change as it is sent to the front end, with short hashes; None if nothing changed."""
        if not (self.stored or self.removed):
            return None
        return KVChange(
            stored=_pack(self.stored, "device"),
            removed=_pack(self.removed, "device"),
            host_stored=_pack(self.stored, "host"),
            host_removed=_pack(self.removed, "host"),
            digest=self.digest,
            blocks=self.blocks,
        )


class KVDeltas:
    """Records stored and removed hashes. `with_tokens`: `describe` first records each block's tokens."""

    __slots__ = ("_blocks", "_digest", "_net", "enabled", "with_tokens")

    def __init__(self, *, enabled: bool, with_tokens: bool = False) -> None:
        self.enabled = enabled
        self.with_tokens = with_tokens
        self._blocks: dict[bytes, StoredBlock] = {}
        self._net: dict[tuple[Tier, bytes], bool] = {}
        self._digest = 0

    def stored(self, tier: Tier, block_hash: bytes) -> None:
        if self.enabled:
            self._record((tier, block_hash), now_there=True)

    def removed(self, tier: Tier, block_hash: bytes) -> None:
        if self.enabled:
            self._record((tier, block_hash), now_there=False)

    def describe(self, block_hash: bytes, position: int, size: int, seq: Sequence) -> None:
        """Record what the full block at a position of a sequence holds."""
        request, first, end = seq.group.request, position * size, (position + 1) * size
        self._blocks[block_hash] = StoredBlock(
            short_hash(block_hash),
            short_hash(seq.hashes[position - 1]) if position else None,
            seq.token_ids[first:end],
            request.cache_salt,
            request.adapter,
            [
                (image.digest, image.start - first)
                for image in request.images
                if image.start < end and first < image.end
            ],
        )

    def drain(self) -> KVDelta:
        net, self._net = self._net, {}
        known, self._blocks = self._blocks, {}
        for tier, block_hash in net:
            self._digest = roll(self._digest, tier, numbers(short_hash(block_hash)))
        there = [key for key, is_there in net.items() if is_there]
        gone = [key for key, is_there in net.items() if not is_there]
        blocks = [known[block_hash] for tier, block_hash in there if tier == "device" and block_hash in known]
        return KVDelta(there, gone, self._digest, blocks)

    def _record(self, key: tuple[Tier, bytes], *, now_there: bool) -> None:
        before = self._net.pop(key, None)
        assert before is not now_there, f"{key} reported twice"
        if before is None:
            self._net[key] = now_there


def _pack(entries: list[tuple[Tier, bytes]], tier: Tier) -> bytes:
    return b"".join(short_hash(block_hash) for of_tier, block_hash in entries if of_tier == tier)
