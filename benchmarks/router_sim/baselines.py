"""Policies without knowledge of caches: random, round robin, least load, and a bounded hash ring over prefixes."""

import bisect
from hashlib import sha256

from router_sim.router_view import PolicyRequest, RouterView

CHARS_PER_TOKEN = 4


class Random:
    def __init__(self, view: RouterView) -> None:
        self.view = view
        self.in_flight = [0] * view.size

    def pick(self, request: PolicyRequest) -> int:
        replica = self.choose(request)
        self.in_flight[replica] += 1
        return replica

    def choose(self, request: PolicyRequest) -> int:
        return self.view.rng.randrange(self.view.size)

    def expected_tokens(self, number: int) -> int | None:
        return None

    def on_frame(self, replica: int) -> None:
        pass

    def on_first_byte(self, request: PolicyRequest, replica: int, cached_tokens: int) -> None:
        pass

    def on_end(self, request: PolicyRequest, replica: int, *, ok: bool) -> None:
        self.in_flight[replica] -= 1

    def argmin(self, values: list[float]) -> int:
        """Return the index of the least value; ties are broken at random."""
        least = min(values)
        return self.view.rng.choice([i for i, value in enumerate(values) if value == least])


class RoundRobin(Random):
    def __init__(self, view: RouterView) -> None:
        super().__init__(view)
        self._next = 0

    def choose(self, request: PolicyRequest) -> int:
        self._next += 1
        return self._next % self.view.size


class LeastLoad(Random):
    """Choose the replica with the fewest requests in flight."""

    def choose(self, request: PolicyRequest) -> int:
        return self.argmin([*map(float, self.in_flight)])


class BoundedRing(Random):
    """KubeAI's PrefixHash: a hash of the first 100 characters on a ring with 256 places per replica.

    A replica with more than 1.25 times the mean load is skipped for the next one on the ring.
    """

    def __init__(self, view: RouterView) -> None:
        super().__init__(view)
        places = [(_place(f"{i}/{v}".encode()), i) for i in range(view.size) for v in range(256)]
        self._ring = sorted(places)

    def choose(self, request: PolicyRequest) -> int:
        start = bisect.bisect(self._ring, (_place(request.text[: 100 // CHARS_PER_TOKEN]), -1))
        limit = 1.25 * (sum(self.in_flight) + 1) / self.view.size
        for step in range(len(self._ring)):
            _, replica = self._ring[(start + step) % len(self._ring)]
            if self.in_flight[replica] <= limit:
                return replica
        raise AssertionError("no replica has at most the mean load")


def _place(key: bytes) -> int:
    return int.from_bytes(sha256(key).digest()[:8], "little")
