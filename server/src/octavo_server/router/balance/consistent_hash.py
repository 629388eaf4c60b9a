"""Bounded consistent hashing: the choice of a replica for a conversation of which no replica is known to hold blocks.

Each replica gets a weight from the conversation's hash and its own name, and the highest weight wins (rendezvous
hashing: a replica that joins or leaves moves only its own conversations). A replica above the load limit is skipped
for the replica with the next weight, which differs from conversation to conversation.
"""

import zlib
from collections.abc import Sequence
from functools import lru_cache

from octavo_server.router.balance.decision import CandidateCost
from octavo_server.router.balance.score import num_requests

_MASK = (1 << 64) - 1


def hash_weight(affinity: int, name: str) -> int:
    """Return the weight of the replica `name` for the conversation hash `affinity`, mixed by splitmix64's finalizer."""
    mixed = (affinity ^ _seed(name)) & _MASK
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & _MASK
    return mixed ^ mixed >> 31


def choose_bounded(affinity: int, costs: Sequence[CandidateCost]) -> CandidateCost:
    """Return the candidate with the highest weight among those within the load limit: there is at least one."""
    limit = load_limit(costs)
    within = [cost for cost in costs if num_requests(cost.replica) <= limit]
    return max(within, key=lambda cost: hash_weight(affinity, cost.replica.name))


def load_limit(costs: Sequence[CandidateCost]) -> float:
    """Most requests that a replica may have to be chosen by its hash weight: 1.25 * mean of the candidates + 1."""
    return 1.25 * sum([num_requests(cost.replica) for cost in costs]) / len(costs) + 1


@lru_cache(maxsize=4096)
def _seed(name: str) -> int:
    return zlib.crc32(name.encode()) * 0x9E3779B97F4A7C15 & _MASK
