"""`OutlierDetector` ejects a replica for a while if its requests fail more often than those of its peers.

The method is Envoy's outlier detection by success rate. The comparison is relative: where a request fails on every
replica, the request is at fault and no replica is ejected. At most half of a model's replicas are ejected at once.
No I/O; the clock is an argument.
"""

from collections.abc import Callable, Collection, Iterable

from octavo_server.router.fleet.local_load import DecayingSum

HALF_LIFE_S = 10.0
#: Least number of recent errors (a decaying sum) for an ejection.
MIN_ERRORS = 2.5
#: Least difference between a replica's share of failed requests and that of its peers for an ejection.
MIN_EXCESS = 0.3
#: Length of the first ejection; each one that soon follows another is twice as long, up to `MAX_EJECTED_S`.
EJECTED_S = 10.0
MAX_EJECTED_S = 300.0


class _Record:
    """Outcomes of one replica's requests. `until_s`, `ejected_s`: end and length of its latest ejection."""

    __slots__ = ("ejected_s", "errors", "total", "until_s")

    def __init__(self) -> None:
        self.errors = DecayingSum(HALF_LIFE_S)
        self.total = DecayingSum(HALF_LIFE_S)
        self.ejected_s = 0.0
        self.until_s = 0.0


class OutlierDetector:
    """The outcomes and ejections of all replicas, by the name of the replica."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._records: dict[str, _Record] = {}
        self._ejected: set[str] = set()

    def record_success(self, name: str) -> None:
        self._record(name).total.add(1, self._clock())

    def record_error(self, name: str, peers: Collection[str]) -> None:
        """Record a failed request of replica `name`. `peers`: replicas of the same model, with or without `name`."""
        now, record = self._clock(), self._record(name)
        record.errors.add(1, now)
        record.total.add(1, now)
        others = [peer for peer in peers if peer != name]
        num_ejected = sum(self.is_ejected(peer) for peer in others)
        may_eject = not self.is_ejected(name) and 2 * (num_ejected + 1) <= len(others) + 1
        if may_eject and record.errors.at(now) >= MIN_ERRORS:
            share = record.errors.at(now) / record.total.at(now)
            if share - self._error_share(others, now) >= MIN_EXCESS:
                self._eject(name, record, now)

    def is_ejected(self, name: str) -> bool:
        if name not in self._ejected:
            return False
        if self._records[name].until_s > self._clock():
            return True
        self._ejected.discard(name)
        return False

    def __bool__(self) -> bool:
        return bool(self._ejected)

    def forget(self, name: str) -> None:
        self._records.pop(name, None)
        self._ejected.discard(name)

    def _eject(self, name: str, record: _Record, now: float) -> None:
        """Eject the replica: twice as long as the last time if that ended recently, otherwise for `EJECTED_S`."""
        is_repeated = now - record.until_s < record.ejected_s
        record.ejected_s = min(2 * record.ejected_s, MAX_EJECTED_S) if is_repeated else EJECTED_S
        record.until_s = now + record.ejected_s
        record.errors, record.total = DecayingSum(HALF_LIFE_S), DecayingSum(HALF_LIFE_S)
        self._ejected.add(name)

    def _error_share(self, names: Iterable[str], now: float) -> float:
        records = [self._records[name] for name in names if name in self._records]
        total = sum(record.total.at(now) for record in records)
        return sum(record.errors.at(now) for record in records) / total if total else 0.0

    def _record(self, name: str) -> _Record:
        record = self._records.get(name)
        if record is None:
            record = self._records[name] = _Record()
        return record
