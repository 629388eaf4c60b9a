"""Bounded consistent hashing: which replica a conversation goes to when nobody is known to have any of it.

Each replica draws a number from the conversation's hash and its own name; the highest has it (rendezvous hashing, so
that a replica that comes or goes moves only its own conversations). One with more than its share of requests is passed
over for the next, which differs from conversation to conversation.
"""

import zlib
from collections.abc import Sequence
from functools import lru_cache

from octavo_server.router.balance.decision import CandidateCost
from octavo_server.router.balance.score import num_requests

_MASK = (1 << 64) - 1


def hash_weight(affinity: int, name: str) -> int:
    """Finalizer of splitmix64 over both."""
    mixed = (affinity ^ _seed(name)) & _MASK
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & _MASK
    return mixed ^ mixed >> 31


def bounded(affinity: int, terms: Sequence[CandidateCost]) -> CandidateCost:
    """The first in the order of their draws that isn't above its share; there always is one."""
    limit = share(terms)
    within = [t for t in terms if num_requests(t.replica) <= limit]
    return max(within, key=lambda t: hash_weight(affinity, t.replica.name))


def share(terms: Sequence[CandidateCost]) -> float:
    """The most requests that a replica may have to be given another one for no other reason than its draw."""
    return 1.25 * sum([num_requests(t.replica) for t in terms]) / len(terms) + 1


@lru_cache(maxsize=4096)
def _seed(name: str) -> int:
    return zlib.crc32(name.encode()) * 0x9E3779B97F4A7C15 & _MASK
