"""`PrefixIndex`: the KV blocks of all replicas, in one table from the block's short hash to a set of replicas.

The set is a bit mask. Each replica has a *slot*, which stands for three bits: on the device, in host memory, predicted
(a request with this block was routed there, and no frame has reported it yet). Equal masks are one shared object, so
an entry takes the memory of its key and its place in the table only.

Memory is capped: the table has two generations, and when they are full the older one is dropped at once. The router
then expects fewer cached blocks than a replica holds, never more. A lookup moves an entry to the young generation.

The table is split into many small dictionaries by the low bits of the hash (hashes are as good as random): growing,
dropping or sweeping one dictionary of millions of entries would stop the event loop for a good part of a second.

A released slot can be acquired again when `sweep` has cleared its bits, a few entries at a time; until then callers
must not pass it to `match`.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

Slot = int

DEVICE, HOST, PREDICTED = 0b001, 0b010, 0b100
_BITS = 3
_MAX_SHARED_MASKS = 65536
_SHARD_ENTRIES = 16384
_MAX_SHARD_BITS = 12


class Match(NamedTuple):
    """Number of a prompt's blocks that a replica holds, from the prompt's beginning without a gap. Of these `blocks`,
    `host` are in host memory but not on the device, and `predicted` are only predicted.
    """

    blocks: int
    host: int = 0
    predicted: int = 0

    @property
    def device(self) -> int:
        return self.blocks - self.host - self.predicted


class PrefixIndex:
    def __init__(self, *, max_entries: int) -> None:
        self.max_entries = max_entries
        self.num_dropped = 0  # entries dropped because the table was full
        num_shards = 1 << min(_MAX_SHARD_BITS, max(0, (max_entries // _SHARD_ENTRIES).bit_length()))
        self._low = num_shards - 1
        self._shard_entries = max(1, max_entries // num_shards // 2)  # capacity of one generation of a shard
        self._young: list[dict[int, int]] = [{} for _ in range(num_shards)]
        self._old: list[dict[int, int]] = [{} for _ in range(num_shards)]
        self._shared: dict[int, int] = {}
        self._num_slots = 0
        self._free_slots: list[Slot] = []
        self.on_slot_released: Callable[[], None] = lambda: None  # called when a slot can be swept
        self._used_slots: set[Slot] = set()
        self._released: list[Slot] = []  # slots released since the current sweep began
        self._sweeping: list[Slot] = []
        self._unswept: list[int] = []  # shards that the current sweep has yet to clear

    def __len__(self) -> int:
        return sum(map(len, self._young)) + sum(map(len, self._old))

    def acquire_slot(self) -> Slot:
        if self._free_slots:
            return self._free_slots.pop()
        self._num_slots += 1
        return self._num_slots - 1

    def release_slot(self, slot: Slot) -> None:
        """Release `slot`. `sweep` clears its entries before it can be acquired again."""
        if slot in self._used_slots:
            self._used_slots.remove(slot)
            self._released.append(slot)
            self.on_slot_released()
        else:
            self._free_slots.append(slot)

    def store(self, slot: Slot, hashes: Iterable[int], kind: int = DEVICE) -> list[int]:
        """Set the slot's bit `kind` for each hash. A stored block's prediction ends; a block on the device gets none.

        With `kind` PREDICTED, return the hashes that were predicted already, otherwise an empty list.
        """
        shift = slot * _BITS
        set_bits, clear, unchanged, repeated = kind << shift, ~(PREDICTED << shift), 0, 0
        if kind == PREDICTED:
            clear, unchanged, repeated = ~0, (DEVICE | PREDICTED) << shift, set_bits
        young, old, low, entries, share = self._young, self._old, self._low, self._shard_entries, self._sharing()
        self._used_slots.add(slot)
        only = share(set_bits, set_bits)
        again: list[int] = []
        for block_hash in hashes:
            shard = block_hash & low
            generation = young[shard]
            mask = generation.get(block_hash)
            if mask is None:
                older = old[shard]
                mask = older.pop(block_hash, 0) if older else 0
                if len(generation) >= entries:
                    generation = self._turn_over(shard)
                if not mask:
                    generation[block_hash] = only
                    continue
                generation[block_hash] = mask
            if mask & unchanged:
                if mask & repeated:
                    again.append(block_hash)
                continue
            new = mask & clear | set_bits
            generation[block_hash] = share(new, new)
        return again

    def remove(self, slot: Slot, hashes: Iterable[int], kind: int = DEVICE) -> None:
        young, old, low, share = self._young, self._old, self._low, self._sharing()
        clear = ~(kind << slot * _BITS)
        for block_hash in hashes:
            generation = young[block_hash & low]
            mask = generation.get(block_hash)
            if mask is None:  # each entry is in one generation only
                generation = old[block_hash & low]
                mask = generation.get(block_hash)
                if mask is None:
                    continue
            left = mask & clear
            if not left:
                del generation[block_hash]
            elif left != mask:
                generation[block_hash] = share(left, left)

    def match(self, hashes: Sequence[int], slots: Iterable[Slot]) -> dict[Slot, Match]:
        """Match a prompt's block hashes with each slot. The result omits slots without a match.

        Neighbouring blocks mostly share one mask, as a prompt's blocks are stored and evicted together: the walk only
        does work where the mask changes.
        """
        young, low = self._young, self._low
        if not hashes or not self._has(hashes[0]):
            return {}
        walk = _Walk({1 << slot * _BITS: slot for slot in slots})
        last: int | None = -1
        for position, mask in enumerate([young[h & low].get(h) for h in hashes]):
            if mask is last:
                continue
            if mask is None:
                mask = self._rejuvenate(hashes[position])
            if not walk.turn(mask, position):
                return walk.found
            last = mask
        walk.end(len(hashes))
        return walk.found

    def sweep(self, max_entries: int) -> int:
        """Clear the bits of released slots in about `max_entries` entries. Return how many are left to sweep."""
        while max_entries > 0 and (self._unswept or self._released):
            if not self._unswept:
                self._sweeping, self._released = self._released, []
                self._unswept = [*range(len(self._young))]
            max_entries -= max(1, self._sweep_shard(self._unswept.pop()))
            if not self._unswept:
                self._free_slots += self._sweeping
        left = sum(len(self._young[shard]) + len(self._old[shard]) for shard in self._unswept)
        return left + (len(self) if self._released else 0)

    def _sweep_shard(self, shard: int) -> int:
        gone = sum((DEVICE | HOST | PREDICTED) << slot * _BITS for slot in self._sweeping)
        share, looked = self._sharing(), 0
        for generations in (self._young, self._old):
            generation = generations[shard]
            looked += len(generation)
            if any(mask & gone for mask in generation.values()):
                generations[shard] = {
                    block_hash: share(left, left) for block_hash, mask in generation.items() if (left := mask & ~gone)
                }
        return looked

    def _has(self, block_hash: int) -> bool:
        shard = block_hash & self._low
        return block_hash in self._young[shard] or block_hash in self._old[shard]

    def _rejuvenate(self, block_hash: int) -> int:
        shard = block_hash & self._low
        if (known := self._young[shard].get(block_hash)) is not None:
            return known
        mask = self._old[shard].pop(block_hash, 0)
        if mask:
            generation = self._young[shard]
            if len(generation) >= self._shard_entries:
                generation = self._turn_over(shard)
            generation[block_hash] = mask
        return mask

    def _turn_over(self, shard: int) -> dict[int, int]:
        """Drop the shard's old generation, make the young one old, and return a new young one."""
        self.num_dropped += len(self._old[shard])
        self._old[shard], self._young[shard] = self._young[shard], {}
        return self._young[shard]

    def _sharing(self) -> Callable[[int, int], int]:
        """Return a function that maps a mask to its one shared object; call it with the mask as both arguments."""
        if len(self._shared) > _MAX_SHARED_MASKS:
            self._shared = {}
        return self._shared.setdefault


class _Walk:
    """Walks along a prompt's blocks and keeps the slots with every block so far. A slot is given by its first bit."""

    __slots__ = ("_alive", "_elsewhere", "_not_on_device", "_on_host", "_since", "_slots", "found")

    def __init__(self, slots: dict[int, Slot]) -> None:
        self.found: dict[Slot, Match] = {}
        self._slots = slots
        self._alive = sum(slots)
        self._elsewhere: dict[int, list[int]] = {}  # slot -> numbers of blocks only in host memory, only predicted
        self._not_on_device = self._on_host = self._since = 0  # slots (as bits) of the block at `_since`

    def turn(self, mask: int, position: int) -> bool:
        """Apply `mask`, which holds from the block at `position` on. Return False if no slot has every block so far."""
        if self._not_on_device:
            self._count(position)
        alive = self._alive
        device = mask & alive
        self._not_on_device = alive ^ device
        if self._not_on_device:
            self._on_host = mask >> 1 & alive
            there = (device | self._on_host | mask >> 2) & alive
            if there != alive:
                self._found(alive ^ there, position)
                self._alive = there
                self._not_on_device &= there
            self._since = position
        return self._alive != 0

    def end(self, position: int) -> None:
        if self._not_on_device:
            self._count(position)
        self._found(self._alive, position)

    def _count(self, position: int) -> None:
        for first in _ones(self._not_on_device):
            counts = self._elsewhere.setdefault(first, [0, 0])
            counts[0 if self._on_host & first else 1] += position - self._since

    def _found(self, ended: int, position: int) -> None:
        if position:
            on_device = Match(position)
            for first in _ones(ended):
                elsewhere = self._elsewhere.get(first)
                self.found[self._slots[first]] = Match(position, *elsewhere) if elsewhere else on_device


def _ones(bits: int) -> Iterable[int]:
    while bits:
        lowest = bits & -bits
        yield lowest
        bits ^= lowest
