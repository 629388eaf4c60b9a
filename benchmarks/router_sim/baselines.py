"""Policies that know little: random, round robin, least load, and a bounded hash ring over 100 characters."""

import bisect
from hashlib import sha256

from router_sim.site import Asked, Site

CHARS_PER_TOKEN = 4


class Random:
    def __init__(self, site: Site) -> None:
        self.site = site
        self.in_flight = [0] * site.size

    def pick(self, asked: Asked) -> int:
        replica = self.choose(asked)
        self.in_flight[replica] += 1
        return replica

    def choose(self, asked: Asked) -> int:
        return self.site.rng.randrange(self.site.size)

    def expected_tokens(self, number: int) -> int | None:
        return None

    def heard(self, replica: int) -> None:
        pass

    def first_byte(self, asked: Asked, replica: int, cached_tokens: int) -> None:
        pass

    def ended(self, asked: Asked, replica: int, *, ok: bool) -> None:
        self.in_flight[replica] -= 1

    def argmin(self, values: list[float]) -> int:
        """Ties by chance."""
        least = min(values)
        return self.site.rng.choice([i for i, value in enumerate(values) if value == least])


class RoundRobin(Random):
    def __init__(self, site: Site) -> None:
        super().__init__(site)
        self._next = 0

    def choose(self, asked: Asked) -> int:
        self._next += 1
        return self._next % self.site.size


class LeastLoad(Random):
    """By requests in flight."""

    def choose(self, asked: Asked) -> int:
        return self.argmin([*map(float, self.in_flight)])


class BoundedRing(Random):
    """As KubeAI's PrefixHash: the first 100 characters on a ring of 256 places for each replica, the next one if that
    has more than 1.25 times the mean load.
    """

    def __init__(self, site: Site) -> None:
        super().__init__(site)
        places = [(_place(f"{i}/{v}".encode()), i) for i in range(site.size) for v in range(256)]
        self._ring = sorted(places)

    def choose(self, asked: Asked) -> int:
        start = bisect.bisect(self._ring, (_place(asked.text[: 100 // CHARS_PER_TOKEN]), -1))
        limit = 1.25 * (sum(self.in_flight) + 1) / self.site.size
        for step in range(len(self._ring)):
            _, replica = self._ring[(start + step) % len(self._ring)]
            if self.in_flight[replica] <= limit:
                return replica
        raise AssertionError("somebody has no more than the mean")


def _place(key: bytes) -> int:
    return int.from_bytes(sha256(key).digest()[:8], "little")
