"""`HostTier`: blocks saved in CPU memory, the tier between the device and recomputation.

An entry is keyed by its block hash or, if it is private to one swapped-out sequence (a partly filled tail; every block,
when prefix caching is off), by (sequence, position). Entries are ordered by last use; a full tier drops the least
recently used entry. Law: free slots + entries + retiring slots == total.

Not obvious: a step copies blocks to the host, then back, in no defined order within each list. So a slot
that this step reads or writes is neither dropped nor reused before the next step: `_touched` holds the step of the last
copy, and the slot of a private entry that this step reads is retired until the next step begins.
"""

from collections.abc import Iterator

from octavo_engine.core.events import KVDeltas
from octavo_engine.wire.plan import SeqId

HostSlot = int
PrivateKey = tuple[SeqId, int]
HostKey = bytes | PrivateKey


class HostTier:
    def __init__(self, num_blocks: int, *, deltas: KVDeltas | None = None) -> None:
        self.num_blocks = num_blocks
        self.num_dropped = 0
        self._deltas = deltas or KVDeltas(enabled=False)
        self._slots: dict[HostKey, HostSlot] = {}  # least recently used first
        self._free = list(range(num_blocks - 1, -1, -1))
        self._retiring: list[HostSlot] = []
        self._touched = [-1] * num_blocks
        self._step = 0

    @property
    def num_used(self) -> int:
        return len(self._slots) + len(self._retiring)

    def begin_step(self, step_id: int) -> None:
        self._step = step_id
        self._free += self._retiring
        self._retiring = []

    def find(self, key: HostKey) -> HostSlot | None:
        """Return the slot of `key`, which keeps its content until the end of the step; None if there is no entry."""
        slot = self._slots.pop(key, None)
        if slot is not None:
            self._slots[key] = slot
            self._touched[slot] = self._step
        return slot

    def put(self, key: HostKey) -> HostSlot | None:
        """Add an entry; return the slot to copy its block into, or None if this step already uses every slot."""
        assert key not in self._slots, f"{key!r} is saved already"
        if not self._free and not self._drop_oldest():
            self.num_dropped += 1
            return None
        slot = self._free.pop()
        self._slots[key] = slot
        self._touched[slot] = self._step
        if isinstance(key, bytes):
            self._deltas.stored("host", key)
        return slot

    def discard(self, key: PrivateKey) -> None:
        """Remove the entry of a block that was saved for one swapped-out sequence, which no longer needs it."""
        slot = self._slots.pop(key, None)
        if slot is None:
            return
        if self._touched[slot] == self._step:
            self._retiring.append(slot)
        else:
            self._free.append(slot)

    def forget_all(self) -> None:
        for key in [*self._slots]:
            self._remove(key)

    def cached_hashes(self) -> Iterator[bytes]:
        return (key for key in self._slots if isinstance(key, bytes))

    def private_keys(self) -> Iterator[PrivateKey]:
        return (key for key in self._slots if not isinstance(key, bytes))

    def check(self) -> None:
        assert len(self._free) + self.num_used == self.num_blocks
        slots = sorted([*self._free, *self._retiring, *self._slots.values()])
        assert slots == list(range(self.num_blocks))

    def _drop_oldest(self) -> bool:
        key = next(iter(self._slots), None)
        if key is None or self._touched[self._slots[key]] == self._step:
            return False
        self.num_dropped += 1
        self._remove(key)
        return True

    def _remove(self, key: HostKey) -> None:
        self._free.append(self._slots.pop(key))
        if isinstance(key, bytes):
            self._deltas.removed("host", key)
