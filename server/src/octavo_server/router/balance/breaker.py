"""Circuit breakers: a replica that failed several times in a row gets no requests for a while. No I/O.

States: closed (failures are counted), open (the replica gets no requests; each opening lasts twice as long as the one
before, up to a limit), half-open (one request is sent as a probe). One success closes a breaker. A replica without a
failure has no breaker.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

BreakerState = Literal["closed", "half-open", "open"]
BREAKER_STATES: tuple[BreakerState, ...] = get_args(BreakerState)

MOST_OPEN_S = 30.0
#: A probe whose outcome is never reported delays the next probe by at most this time.
PROBE_S = 60.0


@dataclass(slots=True)
class _Breaker:
    num_failures: int = 0
    open_s: float = 0.0
    open_until_s: float = 0.0


class Breakers:
    """The circuit breakers of all replicas, by the name of the replica."""

    def __init__(self, *, max_failures: int, open_s: float, clock: Callable[[], float]) -> None:
        self._max_failures = max_failures
        self._open_s = open_s
        self._clock = clock
        self._breakers: dict[str, _Breaker] = {}

    def __bool__(self) -> bool:
        return bool(self._breakers)

    def allows(self, name: str) -> bool:
        breaker = self._breakers.get(name)
        return breaker is None or breaker.open_until_s <= self._clock()

    def record_dispatch(self, name: str) -> None:
        """Record a request to the replica. If its breaker is half-open, this is the probe: `allows` is then False."""
        breaker = self._breakers.get(name)
        if breaker is not None and breaker.open_s:
            breaker.open_until_s = self._clock() + PROBE_S

    def record_success(self, name: str) -> None:
        self._breakers.pop(name, None)

    def release_probe(self, name: str) -> None:
        """Allow another probe: the last one ended without showing whether the replica works."""
        breaker = self._breakers.get(name)
        if breaker is not None and breaker.open_s:
            breaker.open_until_s = min(breaker.open_until_s, self._clock())

    def record_failure(self, name: str) -> None:
        breaker = self._breakers.setdefault(name, _Breaker())
        breaker.num_failures += 1
        if breaker.num_failures >= self._max_failures:
            breaker.open_s = min(MOST_OPEN_S, 2 * breaker.open_s or self._open_s)
            breaker.open_until_s = self._clock() + breaker.open_s

    def state(self, name: str) -> BreakerState:
        breaker = self._breakers.get(name)
        if breaker is None or not breaker.open_s:
            return "closed"
        return "half-open" if breaker.open_until_s <= self._clock() else "open"
