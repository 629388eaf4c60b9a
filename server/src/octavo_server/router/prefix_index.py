"""`PrefixIndex`: which replicas have which KV blocks, in one table from short hash to a set of replicas.

A replica has a *slot*, and a slot has three bits in the mask of each hash: on the device, in host memory, predicted
(a request with this block was routed there, and nothing was heard of it yet). Masks are shared between equal entries,
so that an entry costs its key and its place in the table.

Memory is capped: the table is kept in two generations, and when they are full the older one goes at once. What goes is
forgotten, not wrong: the router then expects less to be found than there is. Looking up keeps an entry young.

A slot that is given up can be used again when `sweep` has taken its bits out, a piece at a time; until then whoever
looks up leaves it out of the slots that it asks for.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

Slot = int

DEVICE, HOST, PREDICTED = 0b001, 0b010, 0b100
_BITS = 3
_MAX_SHARED_MASKS = 65536


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
        self._young: dict[int, int] = {}
        self._old: dict[int, int] = {}
        self._shared: dict[int, int] = {}
        self._num_slots = 0
        self._free_slots: list[Slot] = []
        self._sweeps: deque[_Sweep] = deque()

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def take_slot(self) -> Slot:
        if self._free_slots:
            return self._free_slots.pop()
        self._num_slots += 1
        return self._num_slots - 1

    def give_up_slot(self, slot: Slot) -> None:
        """Its entries mean nothing any more; `sweep` takes them out."""
        self._sweeps.append(_Sweep(slot))

    def store(self, slot: Slot, hashes: Iterable[int], kind: int = DEVICE) -> None:
        """What a replica says of a block replaces what was predicted of it; one on the device isn't predicted."""
        shift = slot * _BITS
        set_bits, clear, known = kind << shift, ~(PREDICTED << shift), 0
        if kind == PREDICTED:
            clear, known = ~0, DEVICE << shift
        for block_hash in hashes:
            mask = self._take(block_hash)
            self._put(block_hash, mask if mask & known else mask & clear | set_bits)

    def remove(self, slot: Slot, hashes: Iterable[int], kind: int = DEVICE) -> None:
        clear = ~(kind << slot * _BITS)
        for generation in (self._young, self._old):
            for block_hash in hashes if generation else ():
                if (mask := generation.get(block_hash)) is not None:
                    _set(generation, block_hash, self._share(mask & clear))

    def match(self, hashes: Sequence[int], slots: Iterable[Slot]) -> dict[Slot, Match]:
        """What each of `slots` has of a prompt with these block hashes; those that have nothing are left out.

        Most neighbours have one mask between them, as a prompt's blocks come and go together: only where another begins
        is there anything to do.
        """
        walk = _Walk({1 << slot * _BITS: slot for slot in slots})
        last: int | None = -1
        for position, mask in enumerate(map(self._young.get, hashes)):
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
        """Look at so many entries for bits of slots that were given up; how many are still to be looked at."""
        while self._sweeps and max_entries > 0:
            sweep = self._sweeps[0]
            if sweep.todo is None:
                sweep.todo = [*self._young, *self._old]
            part = sweep.todo[-max_entries:]
            del sweep.todo[-max_entries:]
            self.remove(sweep.slot, part, DEVICE | HOST | PREDICTED)
            max_entries -= len(part)
            if not sweep.todo:
                self._free_slots.append(sweep.slot)
                self._sweeps.popleft()
        return sum(len(self) if s.todo is None else len(s.todo) for s in self._sweeps)

    def _rejuvenate(self, block_hash: int) -> int:
        mask = self._take(block_hash)
        if mask:
            self._put(block_hash, mask)
        return mask

    def _take(self, block_hash: int) -> int:
        mask = self._young.get(block_hash)
        return self._old.pop(block_hash, 0) if mask is None else mask

    def _put(self, block_hash: int, mask: int) -> None:
        if block_hash not in self._young and len(self._young) >= self.max_entries // 2:
            self.num_forgotten += len(self._old)
            self._old, self._young = self._young, {}
        self._young[block_hash] = self._share(mask)

    def _share(self, mask: int) -> int:
        if len(self._shared) > _MAX_SHARED_MASKS:
            self._shared.clear()
        return self._shared.setdefault(mask, mask)


@dataclass(slots=True)
class _Sweep:
    """`todo`: hashes to look at, once it has begun. What is stored meanwhile can't have the slot's bits."""

    slot: Slot
    todo: list[int] | None = None


def _set(generation: dict[int, int], block_hash: int, mask: int) -> None:
    if mask:
        generation[block_hash] = mask
    else:
        del generation[block_hash]


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
