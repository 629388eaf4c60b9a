"""`TwoQueueCache`: a cache bounded in bytes that a flood of entries without a second access can't empty.

A new entry is on trial: the trial queue has a quarter of the bytes, first in, first out. An entry that is read again
moves to the main queue, which evicts the least recently used. Safe to use from several threads.
"""

import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")

#: Overhead of any entry: its place in the table and the object headers of key and value.
ENTRY_BYTES = 400


class TwoQueueCache(Generic[Key, Value]):
    def __init__(self, max_bytes: int) -> None:
        self.num_bytes = 0
        self._max_bytes = max_bytes
        self._trial_bytes = 0
        self._trial: OrderedDict[Key, tuple[Value, int]] = OrderedDict()
        self._kept: OrderedDict[Key, tuple[Value, int]] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._trial) + len(self._kept)

    def get(self, key: Key) -> Value | None:
        with self._lock:
            entry = self._kept.get(key)
            if entry is not None:
                self._kept.move_to_end(key)
                return entry[0]
            entry = self._trial.pop(key, None)
            if entry is None:
                return None
            self._trial_bytes -= entry[1]
            self._kept[key] = entry
            self._shrink(self._kept, self._max_bytes)
            return entry[0]

    def put(self, key: Key, value: Value, num_bytes: int) -> None:
        """`num_bytes`: size of key and value beyond `ENTRY_BYTES`."""
        num_bytes += ENTRY_BYTES
        with self._lock:
            if key in self._kept or key in self._trial:
                return
            self._trial[key] = (value, num_bytes)
            self.num_bytes += num_bytes
            self._trial_bytes += num_bytes
            while self._trial_bytes > self._max_bytes // 4:
                self._trial_bytes -= self._drop_first(self._trial)

    def _shrink(self, entries: OrderedDict[Key, tuple[Value, int]], max_bytes: int) -> None:
        while self.num_bytes - self._trial_bytes > max_bytes - max_bytes // 4:
            self._drop_first(entries)

    def _drop_first(self, entries: OrderedDict[Key, tuple[Value, int]]) -> int:
        _, (_, num_bytes) = entries.popitem(last=False)
        self.num_bytes -= num_bytes
        return num_bytes
