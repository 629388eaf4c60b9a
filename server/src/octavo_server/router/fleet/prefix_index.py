"""`PrefixIndex`: which replicas have which KV blocks, in one table from short hash to a set of replicas.

A replica has a *slot*, and a slot has three bits in the mask of each hash: on the device, in host memory, predicted
(a request with this block was routed there, and nothing was heard of it yet). Masks are shared between equal entries,
so that an entry costs its key and its place in the table.

Memory is capped: the table is kept in two generations, and when they are full the older one goes at once. What goes is
forgotten, not wrong: the router then expects less to be found than there is. Looking up keeps an entry young.

The table is many small dictionaries, by the low bits of the hash (hashes are as good as random): to grow, drop or sweep
one of millions of entries would hold up everything else for a good part of a second.

A slot that is given up can be used again when `sweep` has taken its bits out, a piece at a time; until then whoever
looks up leaves it out of the slots that it asks for.
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
    """What a replica has of a prompt: `blocks` without a gap from its beginning, so many of them not on the device."""

    blocks: int
    host: int = 0
    predicted: int = 0

    @property
    def device(self) -> int:
        return self.blocks - self.host - self.predicted


class PrefixIndex:
    def __init__(self, *, max_entries: int) -> None:
        self.max_entries = max_entries
        self.num_forgotten = 0  # entries that went because the table was full
        num_shards = 1 << min(_MAX_SHARD_BITS, max(0, (max_entries // _SHARD_ENTRIES).bit_length()))
        self._low = num_shards - 1
        self._shard_entries = max(1, max_entries // num_shards // 2)  # of one generation
        self._young: list[dict[int, int]] = [{} for _ in range(num_shards)]
        self._old: list[dict[int, int]] = [{} for _ in range(num_shards)]
        self._shared: dict[int, int] = {}
        self._num_slots = 0
        self._free_slots: list[Slot] = []
        self.on_given_up: Callable[[], None] = lambda: None  # there is something to sweep
        self._used_slots: set[Slot] = set()
        self._given_up: list[Slot] = []  # after the sweep that is on began
        self._sweeping: list[Slot] = []
        self._unswept: list[int] = []  # shards

    def __len__(self) -> int:
        return sum(map(len, self._young)) + sum(map(len, self._old))

    def take_slot(self) -> Slot:
        if self._free_slots:
            return self._free_slots.pop()
        self._num_slots += 1
        return self._num_slots - 1

    def give_up_slot(self, slot: Slot) -> None:
        """Its entries mean nothing any more; `sweep` takes them out."""
        if slot in self._used_slots:
            self._used_slots.remove(slot)
            self._given_up.append(slot)
            self.on_given_up()
        else:
            self._free_slots.append(slot)

    def store(self, slot: Slot, hashes: Iterable[int], kind: int = DEVICE) -> list[int]:
        """What a replica says of a block replaces what was predicted of it; one on the device isn't predicted.

        Of what is predicted: what was already. Of the rest: nothing.
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
            if mask is None:  # it is in one of them only
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
        """What each of `slots` has of a prompt with these block hashes; those that have nothing are left out.

        Most neighbours have one mask between them, as a prompt's blocks come and go together: only where another begins
        is there anything to do.
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
        """Look at some `max_entries` for bits of slots that were given up; how many are still to be looked at."""
        while max_entries > 0 and (self._unswept or self._given_up):
            if not self._unswept:
                self._sweeping, self._given_up = self._given_up, []
                self._unswept = [*range(len(self._young))]
            max_entries -= max(1, self._sweep_shard(self._unswept.pop()))
            if not self._unswept:
                self._free_slots += self._sweeping
        left = sum(len(self._young[shard]) + len(self._old[shard]) for shard in self._unswept)
        return left + (len(self) if self._given_up else 0)

    def _sweep_shard(self, shard: int) -> int:
        """How many entries were looked at."""
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
        """The old generation goes, the young one is the old one now; the new young one."""
        self.num_forgotten += len(self._old[shard])
        self._old[shard], self._young[shard] = self._young[shard], {}
        return self._young[shard]

    def _sharing(self) -> Callable[[int, int], int]:
        """To be called with a mask, twice: the one object there is of it."""
        if len(self._shared) > _MAX_SHARED_MASKS:
            self._shared = {}
        return self._shared.setdefault


class _Walk:
    """Along one prompt: which slots have had every block so far. A slot is known here by its first bit."""

    __slots__ = ("_alive", "_elsewhere", "_not_on_device", "_on_host", "_since", "_slots", "found")

    def __init__(self, slots: dict[int, Slot]) -> None:
        self.found: dict[Slot, Match] = {}
        self._slots = slots
        self._alive = sum(slots)
        self._elsewhere: dict[int, list[int]] = {}  # blocks in host memory, predicted ones
        self._not_on_device = self._on_host = self._since = 0  # as they are since that position

    def turn(self, mask: int, position: int) -> bool:
        """From here on blocks have this mask. False if no slot goes on."""
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
