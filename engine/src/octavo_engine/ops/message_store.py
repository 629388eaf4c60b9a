"""`MessageStore`: the store through which the ranks of a group find each other, over the ranks' existing message
channels.

Torch's own TCP store listens on every interface without authentication, and its file store needs a shared file system.
gloo calls only `set`, `wait` and `get`, each for one entry per rank.
"""

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, cast

import torch.distributed as dist

#: Time within which all ranks must connect: ranks that have imported their packages wait for slower ones.
MEETING_TIMEOUT = timedelta(minutes=10)


class MessageStore(dist.Store):  # type: ignore[name-defined,misc]  # torch's types lack it
    """The entries of several groups; each key begins with its group's name. Only the thread that opens groups calls it.

    `send`: sends an entry to all other ranks. `receive`: returns the next entry from another rank, or raises
    TimeoutError after the given number of seconds.
    """

    def __init__(
        self, send: Callable[[str, bytes], None], receive: Callable[[float], tuple[str, bytes]], timeout: timedelta
    ) -> None:
        super().__init__()
        self._send, self._receive, self._timeout_s = send, receive, timeout.total_seconds()
        self._entries: dict[str, bytes] = {}

    def set(self, key: str, value: bytes) -> None:
        self._entries[key] = value
        self._send(key, value)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait for entries. Raises TimeoutError if one does not come in time."""
        ends_s = time.monotonic() + (self._timeout_s if timeout is None else timeout.total_seconds())
        while not self._entries.keys() >= set(keys):
            key, value = self._receive(max(0.0, ends_s - time.monotonic()))
            self._entries[key] = value

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._entries[key]


def named(store: Any, name: str) -> Any:
    """Return a view of a store with the entries of one group."""
    return cast("Any", dist).PrefixStore(name, store)  # torch's types lack it
