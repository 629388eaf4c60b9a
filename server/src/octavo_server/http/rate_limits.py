"""`RateLimits` decides whether a tenant may send one more request. It has a clock, but does no I/O.

The use of a tenant is its work of the last minute in the reports of all replicas (`TenantLoad`), plus the requests of
this process that no report includes yet. Processes with the same replicas thus share a limit without communicating, and
a new process has all figures at once. The report of a replica that restarted or left counts for one more minute. A
replica without reports counts by this process's own requests.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping
from math import ceil, exp
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple

from octavo_server.http.tenants_file import TenantLimits
from octavo_server.openai.errors import RateLimited

if TYPE_CHECKING:
    from octavo_server.kv.frames import TenantLoad

WINDOW_S = 60.0
#: A report includes every request that was sent at least `REPORT_S` before it, and every end at least `END_S` before
#: it.
REPORT_S, END_S = 2.0, 0.25
#: Time without a report after which a replica's requests in progress no longer count.
SILENCE_S = 2.0
#: Requests sent in a second are in no report once `WINDOW_S + LATE_S` have passed since that second began.
LATE_S = 2.0
BUSY_RETRY_S = 1.0
LEAST_PART = 0.25  # a process uses at least this share of a tenant's free places
UNSENT = ""  # replaces the replica's name for requests that were not sent yet


class TenantUse(NamedTuple):
    """`requests`, `tokens`: use in the last minute. `own`, `others`: requests in progress of this process and of other
    processes. `unreported`: requests of this process that no report includes yet."""

    requests: int
    tokens: int
    own: int
    others: int
    unreported: int


class _Report(NamedTuple):
    epoch: int
    loads: "Mapping[str, TenantLoad]"
    at_s: float


class _Place:
    """One tenant's requests of this process at one replica.

    If a report has n more requests than the previous one, the n oldest unreported requests count as reported; ends are
    counted in the same way.
    """

    def __init__(self) -> None:
        self.unreported: deque[OwnRequest] = deque()
        self.tokens = 0  # of the unreported requests
        self.running = 0
        self.ends: deque[float] = deque()  # times of the unreported ends
        self.received = self.unfinished = 0  # of the latest report

    @property
    def num_reported(self) -> int:
        """Upper bound of this process's requests that the latest report counts as unfinished."""
        return self.running + len(self.ends)

    def discard(self, request: "OwnRequest") -> None:
        if request in self.unreported:
            self.unreported.remove(request)
            self.tokens -= request.tokens

    def record_report(self, received: int, unfinished: int) -> None:
        num_new = received - self.received
        num_ended = num_new - (unfinished - self.unfinished)
        self.received, self.unfinished = received, unfinished
        for _ in range(min(num_new, len(self.unreported))):
            self.discard(self.unreported[0])
        for _ in range(min(num_ended, len(self.ends))):
            self.ends.popleft()

    def expire(self, sent_before_s: float, ended_before_s: float) -> None:
        while self.unreported and self.unreported[0].sent_s <= sent_before_s:
            self.discard(self.unreported[0])
        while self.ends and self.ends[0] <= ended_before_s:
            self.ends.popleft()


class OwnRequest:
    """A request of this process, from its admission to its end. `headers`: headers for its response. `tokens`: an
    estimate."""

    __slots__ = ("_limits", "_place", "headers", "is_refused", "sent_s", "tenant", "tokens")

    def __init__(self, limits: "RateLimits", tenant: str, tokens: int) -> None:
        self._limits = limits
        self._place: _Place | None = None  # None if its tenant has no limits
        self.headers: dict[str, str] = {}
        self.is_refused = False  # the latest replica refused it or failed
        self.tenant = tenant
        self.tokens = tokens

    def record_sent(self, replica: str) -> None:
        if self._place is not None:
            self.forget()
            self._place.running -= 1
            self.enter(replica)

    def enter(self, replica: str) -> None:
        self._place, self.sent_s = self._limits.enter(self, replica)
        self.is_refused = False

    def forget(self) -> None:
        """Count nothing for the request, as the replica refused it or failed."""
        self.is_refused = True
        if self._place is not None:
            self._place.discard(self)

    def __enter__(self) -> "OwnRequest":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def end(self) -> None:
        place, self._place = self._place, None
        if place is not None:
            self._limits.leave(self, place)


class RateLimits:
    """Belongs to one event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._places: dict[str, dict[str, _Place]] = {}  # by tenant and replica
        self._sent: dict[str, deque[list[int]]] = {}  # by tenant: second, requests sent in it, their tokens
        self._lately: dict[str, tuple[float, float, float]] = {}  # by tenant: mean `own` and `others` of a second, time
        self._reports: dict[str, _Report] = {}  # by replica
        self._departed: list[_Report] = []
        self._forget_at_s = self._forget_tenants_at_s = clock()

    def record_report(self, replica: str, epoch: int, loads: "Mapping[str, TenantLoad]") -> None:
        """Record `loads`, the replica's present work, which the caller may update."""
        now = self._clock()
        before = self._reports.get(replica)
        if before is not None and before.epoch != epoch:
            self._departed.append(before)
        self._reports[replica] = _Report(epoch, loads, now)
        self._forget_reports(now)

    def admit(self, tenant: str, limits: TenantLimits, tokens: int) -> OwnRequest:
        """Admit a request. Raises RateLimited beyond a limit; the request then counts for nothing."""
        request = OwnRequest(self, tenant, tokens)
        headers = self.check(tenant, limits, tokens)
        if headers is not None:
            request.headers = headers
            request.enter(UNSENT)
        return request

    def usage(self, tenant: str) -> TenantUse:
        now, places = self._clock(), self._places.get(tenant, {})
        self._forget_reports(now)
        requests = tokens = own = others = unreported = 0
        for load in [report.loads[tenant] for report in self._departed if tenant in report.loads]:
            requests, tokens = requests + load.requests, tokens + load.tokens
        for name, report in self._reports.items():
            reported, place = report.loads.get(tenant), places.get(name)
            if place is not None:
                place.record_report(*((reported.received, reported.unfinished) if reported is not None else (0, 0)))
                place.expire(report.at_s - REPORT_S, report.at_s - END_S)
            if reported is not None:
                requests, tokens = requests + reported.requests, tokens + reported.tokens
                if now - report.at_s < SILENCE_S:
                    others += max(reported.unfinished - (0 if place is None else place.num_reported), 0)
        for name, place in [*places.items()]:
            place.expire(now - WINDOW_S, now - SILENCE_S)
            if not (place.running or place.unreported or place.ends):
                del places[name]
            own, unreported, tokens = own + place.running, unreported + len(place.unreported), tokens + place.tokens
        return TenantUse(requests + unreported, tokens, own, others, unreported)

    def _forget_reports(self, now: float) -> None:
        if now >= self._forget_at_s:
            self._forget_at_s = now + 1
            self._reports = {name: report for name, report in self._reports.items() if now - report.at_s < WINDOW_S}
            self._departed = [report for report in self._departed if now - report.at_s < WINDOW_S]
        if now >= self._forget_tenants_at_s:
            self._forget_tenants_at_s = now + WINDOW_S
            for tenant in [*filter(self._is_idle, {*self._places, *self._lately})]:
                for by_tenant in (self._places, self._sent, self._lately):
                    by_tenant.pop(tenant, None)

    def _is_idle(self, tenant: str) -> bool:
        """Return whether the tenant has no request in progress here and no earlier request that may still count."""
        sent, places = self._sent.get(tenant), self._places.get(tenant, {})
        is_old = not sent or sent[-1][0] + LATE_S + WINDOW_S <= self._clock()
        return is_old and not any(place.running for place in places.values())

    def enter(self, request: OwnRequest, replica: str) -> tuple[_Place, float]:
        """Count a request at a replica, or as unsent. Return its place and the time."""
        now, places = self._clock(), self._places.setdefault(request.tenant, {})
        place = places.get(replica)
        if place is None:
            report = self._reports.get(replica)
            load = None if report is None else report.loads.get(request.tenant)
            place = places[replica] = _Place()
            if load is not None:
                place.record_report(load.received, load.unfinished)
        place.unreported.append(request)
        place.tokens += request.tokens
        place.running += 1
        if replica != UNSENT:
            sent = self._sent.setdefault(request.tenant, deque())
            while sent and sent[0][0] + LATE_S + WINDOW_S <= now:
                sent.popleft()
            if not sent or sent[-1][0] != int(now):
                sent.append([int(now), 0, 0])
            sent[-1][1] += 1
            sent[-1][2] += request.tokens
        return place, now

    def leave(self, request: OwnRequest, place: _Place) -> None:
        places = self._places[request.tenant]
        place.running -= 1
        if not request.is_refused:  # no report has the end of a refused one
            place.ends.append(self._clock())
        if place is places.get(UNSENT):
            place.discard(request)

    def check(self, tenant: str, limits: TenantLimits, tokens: int = 0) -> dict[str, str] | None:
        """Return headers for the response, None without limits. Raises RateLimited beyond a limit."""
        if not (limits.requests_per_minute or limits.tokens_per_minute or limits.concurrent_requests):
            return None
        used, headers, refusals = self.usage(tenant), dict[str, str](), list[tuple[float, str]]()
        caller, has = (f"The API key {tenant!r}", "has") if tenant else ("Callers without an API key", "have")
        per_minute = (
            (1, "requests", used.requests, limits.requests_per_minute, "requestsPerMinute"),
            (2, "tokens", used.tokens, limits.tokens_per_minute, "tokensPerMinute"),
        )
        for column, what, num, limit, field in per_minute:
            if limit is not None:
                wait_s = self._wait_s(tenant, column, max(num - limit + 1, 1))
                left = 0 if num >= limit else max(limit - num - (1, tokens)[column - 1], 0)
                values = {"limit": limit, "remaining": left, "reset": f"{ceil(wait_s)}s"}
                headers |= {f"x-ratelimit-{name}-{what}": str(value) for name, value in values.items()}
                if num >= limit:
                    refusals.append((wait_s, f"used {num} {what} in the last minute; the limit is {limit} ({field})"))
        if limits.concurrent_requests is not None and not self._has_place(tenant, limits.concurrent_requests, used):
            most = f"the limit is {limits.concurrent_requests} (concurrentRequests)"
            refusals.append((BUSY_RETRY_S, f"{has} {used.own + used.others} requests in progress; {most}"))
        if refusals:
            wait_s, why = max(refusals)
            raise RateLimited(f"{caller} {why}: send the request again in {ceil(wait_s)} s.", ceil(wait_s), headers)
        return headers

    def _has_place(self, tenant: str, limit: int, used: TenantUse) -> bool:
        """Return whether the tenant may have one more request in progress.

        Between two reports, a process uses only its share of the free places, because all processes see the same ones.
        The share is the process's part of the requests that were lately in progress.
        """
        now = self._clock()
        own, others, at_s = self._lately.get(tenant, (0.0, 0.0, now))
        weight = 1 - exp(at_s - now)
        own, others = own + weight * (used.own - own), others + weight * (used.others - others)
        self._lately[tenant] = own, others, now
        free = limit - used.own - used.others
        part = max(own / (own + others), LEAST_PART) if others > 0.5 else 1.0
        return free > 0 and used.unreported < max((free + used.unreported) * part, 1)

    def _wait_s(self, tenant: str, column: int, excess: int) -> float:
        """Estimate from this process's requests the seconds until `excess` requests or tokens no longer count."""
        for row in self._sent.get(tenant, ()):
            wait_s = row[0] + LATE_S + WINDOW_S - self._clock()
            excess -= row[column] if wait_s > 0 else 0
            if excess <= 0:
                return min(wait_s, WINDOW_S)
        return WINDOW_S
