"""Bounded consistent hashing: the choice of a replica for a conversation of which no replica is known to hold blocks.

Each replica gets a weight from the conversation's hash and its own name, and the highest weight wins (rendezvous
hashing: a replica that joins or leaves moves only its own conversations). A replica with more than its share of
requests is skipped for the next weight, which is another replica for each conversation.
"""

import zlib
from collections.abc import Sequence
from functools import lru_cache

from octavo_server.router.balance.decision import CandidateCost
from octavo_server.router.balance.score import num_requests

_MASK = (1 << 64) - 1


def hash_weight(affinity: int, name: str) -> int:
    """Hash both with the finalizer of splitmix64."""
    mixed = (affinity ^ _seed(name)) & _MASK
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & _MASK
    return mixed ^ mixed >> 31


def choose_bounded(affinity: int, costs: Sequence[CandidateCost]) -> CandidateCost:
    """Return the candidate with the highest weight within the load limit; at least one is within it."""
    limit = load_limit(costs)
    within = [cost for cost in costs if num_requests(cost.replica) <= limit]
    return max(within, key=lambda cost: hash_weight(affinity, cost.replica.name))


def load_limit(costs: Sequence[CandidateCost]) -> float:
    """Number of requests up to which a replica may be chosen by weight: a quarter and one more than the mean."""
    return 1.25 * sum([num_requests(cost.replica) for cost in costs]) / len(costs) + 1


@lru_cache(maxsize=4096)
def _seed(name: str) -> int:
    return zlib.crc32(name.encode()) * 0x9E3779B97F4A7C15 & _MASK
