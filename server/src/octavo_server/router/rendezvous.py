"""Bounded consistent hashing: which replica a conversation goes to when nobody is known to have any of it.

Each replica draws a number from the conversation's hash and its own name; the highest has it (rendezvous hashing, so
that a replica that comes or goes moves only its own conversations). One with more than its share of requests is passed
over for the next, which differs from conversation to conversation.
"""

import zlib
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from octavo_server.router.replica import Replica

_MASK = (1 << 64) - 1


def draw(affinity: int, name: str) -> int:
    """Finalizer of splitmix64 over both."""
    mixed = (affinity ^ _seed(name)) & _MASK
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & _MASK
    return mixed ^ mixed >> 31


def bounded(affinity: int, replicas: "Sequence[Replica]", num_requests: "Callable[[Replica], int]") -> "Replica":
    """The first in the order of their draws that isn't above its share; there always is one."""
    counts = {replica: num_requests(replica) for replica in replicas}
    limit = share(sum(counts.values()), len(replicas))
    return max((r for r in replicas if counts[r] <= limit), key=lambda r: draw(affinity, r.name))


def share(total: int, num_replicas: int) -> float:
    return 1.25 * total / num_replicas + 1


@lru_cache(maxsize=4096)
def _seed(name: str) -> int:
    return zlib.crc32(name.encode()) * 0x9E3779B97F4A7C15 & _MASK
