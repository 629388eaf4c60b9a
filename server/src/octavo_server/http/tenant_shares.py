"""Shares of a bounded resource: a tenant holds at most a fraction of it while other tenants use it, too.

A tenant is the name of an API key; callers without a key are one tenant. Another tenant counts while it holds a part of
the resource, and for `PRESENCE_S` after its last request: it then finds room although the first tenant sends all that
it may. A tenant that is alone may hold everything.
"""

from collections import Counter
from collections.abc import Callable

PRESENCE_S = 60.0


class TenantShares:
    """Amounts of a resource by tenant. `size`: all of it, in the resource's unit."""

    def __init__(self, size: int, fraction: float, clock: Callable[[], float]) -> None:
        self._share = int(size * fraction)
        self._clock = clock
        self._held: Counter[str] = Counter()
        self._num_held = 0
        self._latest, self._latest_s = "", float("-inf")  # the tenant of the latest request, and its time
        self._other_s = float("-inf")  # the time of the latest request of any other tenant

    def record_request(self, tenant: str) -> None:
        if tenant != self._latest:
            self._other_s, self._latest = self._latest_s, tenant
        self._latest_s = self._clock()

    def held(self, tenant: str) -> int:
        return self._held[tenant]

    def limit(self, tenant: str) -> int | None:
        """Return the amount that the tenant may hold now; None if it is alone."""
        seen_s = self._other_s if tenant == self._latest else self._latest_s
        is_alone = self._num_held == self._held[tenant] and self._clock() - seen_s > PRESENCE_S
        return None if is_alone else self._share

    def add(self, tenant: str, amount: int) -> None:
        """Record that the tenant holds `amount` more, or less if that is negative."""
        self._held[tenant] += amount
        self._num_held += amount
        if not self._held[tenant]:
            del self._held[tenant]
