"""`Forwarder`: one request to one replica after another until one answers, and that answer to the client.

A request is sent anew, to another replica, only while nothing of an answer has gone out:
- no connection, or the replica had none of it: to each replica that there is;
- the connection broke, or the replica answers 502, 503, 504 or (it is full) 429: at most `max_retries` times. The last
  such answer goes through as it came, but for that of a replica that ends: the request waits for the next one.
A request whose answer doesn't begin in time ends with 504: sent anew it would take as long again. 500 goes through: the
request itself may be why. An answer that isn't a stream goes out when it is complete, so it can be had elsewhere until
then; one that outgrows its buffer goes out as it comes.
"""

import asyncio
import time
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING

from octavo_engine.wire.errors import OctavoError

from octavo_server.openai.errors import ReplicaLost, ReplicaTimeout
from octavo_server.router.balance.breaker import Breakers
from octavo_server.router.balance.picker import Picker
from octavo_server.router.balance.wait import Wait
from octavo_server.router.fleet.fleet import Fleet
from octavo_server.router.proxy.attempt import Attempt, Job
from octavo_server.router.proxy.sse import SSEFramer
from octavo_server.router.settings import ForwardLimits
from octavo_server.router.upstream.connection import NotReached
from octavo_server.router.upstream.headers import answer_headers, request_head, value_of

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from octavo_server.router.balance.decision import Decision
    from octavo_server.router.balance.queue import RequestQueue
    from octavo_server.router.fleet.replica import Replica
    from octavo_server.router.proxy.downstream import Downstream
    from octavo_server.router.upstream.connection import UpstreamResponse
    from octavo_server.router.upstream.headers import Headers
    from octavo_server.router.upstream.pool import ConnectionPools

ELSEWHERE = frozenset({429, 502, 503, 504})
#: Of these, the ones that speak against the replica. Being full doesn't.
FAILURES = ELSEWHERE - {429}
#: nginx before the router would hold a stream back.
UNBUFFERED = (b"x-accel-buffering", b"no")
CACHED_TOKENS = b"x-octavo-cached-tokens"
#: Between rounds: a replica that isn't there any more is soon known not to be.
ROUND_PAUSE_S = 0.05


class Refused(OctavoError):
    """A replica answered that it can't take the request."""

    def __init__(self, status: int) -> None:
        super().__init__(f"the replica answered {status}")
        self.status = status


@dataclass(frozen=True, slots=True, kw_only=True)
class Forwarder:
    fleet: "Fleet"
    picker: "Picker"
    upstream: "ConnectionPools"
    breakers: "Breakers"
    room: "RequestQueue"
    limits: "ForwardLimits"

    async def forward(self, job: Job, caller: "Downstream", attempt: Attempt | None = None) -> None:
        """Returns when the answer is out. Raises what the client is to be told. `attempt`: the first, begun already."""
        tried: list[Replica] = []
        num_lost = 0
        wait = Wait(self, job.model)
        if attempt is None and self.room.is_asked_for(job.model):
            await wait.turn()
        while True:
            if attempt is None:
                candidates = self.candidates(job.model) if not tried else self._others(job.model, tried)
                if not candidates:
                    if tried:
                        await asyncio.sleep(ROUND_PAUSE_S)
                        tried.clear()
                    await wait.turn()
                    continue
                attempt = self.begin(job, candidates)
            chosen, can_retry = attempt.decision.chosen, num_lost < self.limits.max_retries
            try:
                await self._finish(job, caller, attempt, tried if can_retry else None)
                return
            except (ReplicaLost, Refused) as error:
                if not isinstance(error, NotReached):
                    num_lost += 1
                if caller.has_started or not can_retry:
                    raise
                job.track.retried(_reason(error))
                tried.append(chosen)
                attempt = None

    def begin(self, job: Job, candidates: "Sequence[Replica]") -> Attempt:
        """Decided and, where a connection is free, sent. It has to be finished, or settled."""
        decision = self._decide(job, candidates)
        replica = decision.chosen
        ticket = self.picker.sent(decision, job.prompt)
        self.breakers.sent(replica.name)
        origin = self.upstream.origin(replica.url)
        head = request_head(job.target, job.headers, origin.host, len(job.body), without=job.without, more=job.more)
        request = head + job.body
        return Attempt(decision, ticket, origin, request, origin.begin(request, self.limits.first_byte_timeout_s))

    def settle(self, attempt: Attempt, *, is_ok: bool, has_failed: bool) -> None:
        """`has_failed`: it speaks against the replica."""
        attempt.ticket.ended(is_ok)
        name, exchange = attempt.decision.chosen.name, attempt.exchange
        if exchange is not None:
            exchange.close()
            has_failed = has_failed or exchange.status in FAILURES
        if has_failed:
            self.breakers.failed(name)
        elif self.breakers:
            self.breakers.untold(name)

    def begin_answer(self, job: Job, attempt: Attempt, exchange: "UpstreamResponse") -> "Headers":
        """Of what is there by now: all that goes before it, but for the framing."""
        headers, decision = exchange.headers, attempt.decision
        if self.breakers and exchange.status < 500:
            self.breakers.succeeded(decision.chosen.name)
        cached = value_of(headers, CACHED_TOKENS)
        num_cached = int(cached) if cached.isdigit() else None
        attempt.ticket.first_byte(num_cached)
        job.track.first_byte(num_cached)
        out = answer_headers(headers, whole_bytes=exchange.num_waiting if exchange.is_complete else None)
        out.append((b"x-octavo-rung", decision.rung.encode()))
        out.append((b"x-octavo-replica", decision.chosen.name.encode("latin-1", "replace")))
        return out

    def _decide(self, job: Job, candidates: "Sequence[Replica]") -> "Decision":
        started_s = time.perf_counter()
        decision = self.picker.pick(job.prompt, candidates)
        job.track.decided(job.prompt, decision, time.perf_counter() - started_s)
        return decision

    def candidates(self, model: str) -> "Sequence[Replica]":
        replicas = self.fleet.routable(model)
        most = self.limits.max_requests_per_replica
        if most is None and not self.breakers:
            return replicas
        return [
            replica
            for replica in replicas
            if self.breakers.allows(replica.name) and (most is None or replica.num_in_flight < most)
        ]

    def _others(self, model: str, tried: "Collection[Replica]") -> "Sequence[Replica]":
        """For another attempt: one that failed lately is still better than one that failed just now."""
        allowed = [replica for replica in self.candidates(model) if replica not in tried]
        return allowed or [replica for replica in self.fleet.routable(model) if replica not in tried]

    async def _finish(
        self, job: Job, caller: "Downstream", attempt: Attempt, tried: "Sequence[Replica] | None"
    ) -> None:
        """`tried`: before this one; None for the last attempt, which takes any answer."""
        is_ok = has_failed = False
        try:
            exchange = await attempt.answered(self.limits.first_byte_timeout_s)
            others = (*tried, attempt.decision.chosen) if tried is not None else ()
            if exchange.status in ELSEWHERE and others and await self._can_wait(job.model, others, exchange):
                raise Refused(exchange.status)
            await self._answer(job, caller, attempt, exchange)
            is_ok = exchange.status < 500
        except (ReplicaLost, ReplicaTimeout):
            has_failed = True
            raise
        finally:
            self.settle(attempt, is_ok=is_ok, has_failed=has_failed)

    async def _can_wait(self, model: str, tried: "Sequence[Replica]", exchange: "UpstreamResponse") -> bool:
        """There is another replica, or this one refuses because it ends, so that another one may be about to come."""
        if self._others(model, tried):
            return True
        if exchange.status != HTTPStatus.SERVICE_UNAVAILABLE or value_of(exchange.headers, b"connection") != b"close":
            return False
        if tried[-1].is_routable:  # its stream says so, too, by now or soon
            await asyncio.sleep(ROUND_PAUSE_S)
        return not tried[-1].is_routable

    async def _answer(self, job: Job, caller: "Downstream", attempt: Attempt, exchange: "UpstreamResponse") -> None:
        is_stream = exchange.is_stream
        exchange.limit_s = self.limits.idle_timeout_s
        if not is_stream:
            await exchange.gathered()
        is_whole = exchange.is_complete
        out = self.begin_answer(job, attempt, exchange)
        if is_stream and not value_of(exchange.headers, b"content-encoding"):
            caller.gate = SSEFramer()
        if is_stream and not value_of(exchange.headers, UNBUFFERED[0]):
            out.append(UNBUFFERED)
        whole = exchange.take() if is_whole else b""
        await caller.start(exchange.status, out)
        if is_whole:
            await caller.finish(whole)
        else:
            await _pass_on(caller, exchange)


async def _pass_on(caller: "Downstream", exchange: "UpstreamResponse") -> None:
    gate = caller.gate
    while True:
        await exchange.news()
        is_complete = exchange.is_complete
        data = exchange.take()
        if gate is not None:
            data = gate.feed(data)
        if is_complete:
            await caller.finish(data if gate is None else data + gate.rest())
            return
        if data:
            await caller.write(data)


def _reason(error: ReplicaLost | Refused) -> str:
    if isinstance(error, Refused):
        return f"status {error.status}"
    return "not reached" if isinstance(error, NotReached) else "lost"
