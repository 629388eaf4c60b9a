"""`ProxyHandler` handles one client request from its head to its single terminal event, on bare ASGI.

The prompt is hashed as the replicas hash it, so that the router knows which replicas hold its blocks. A body that the
router can't parse is forwarded all the same: the replica responds with the reason. This is the request boundary: no
error passes it, and each request is counted once.
"""

import asyncio
import logging
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo_engine.wire.errors import Overloaded, Unavailable
from starlette.types import Receive, Scope, Send

from octavo_server.http.access import AccessPolicy, port_of
from octavo_server.http.body import BodyBudget, BodyReservation
from octavo_server.http.cors import CorsPolicy
from octavo_server.http.in_flight import InFlight
from octavo_server.http.lifecycle import Lifecycle
from octavo_server.http.rate_limits import RateLimits
from octavo_server.http.request_id import request_id_of
from octavo_server.http.request_threads import TENANT
from octavo_server.http.responses import log_failure
from octavo_server.http.router_secret import (
    MAX_TOKENS_HEADER,
    SECRET_HEADER,
    TENANT_HEADER,
    WEIGHT_HEADER,
    OutgoingSecret,
)
from octavo_server.http.tenants_file import NO_LIMITS, TenantLimits, TenantsFile
from octavo_server.openai.errors import MalformedRequest, RateLimited, ReplicaLost, ReplicaTimeout, describe
from octavo_server.router.balance.balancer import Balancer
from octavo_server.router.fleet.fleet import Fleet
from octavo_server.router.observe.request_observer import CLIENT_LEFT, RequestObserver, RouterTelemetry
from octavo_server.router.prompts.prompt import Prompt, RouteKind
from octavo_server.router.prompts.prompt_source import PromptSource, RequestFields
from octavo_server.router.proxy.downstream import ClientLeft, Downstream
from octavo_server.router.proxy.relay import cached_tokens, client_headers, relay
from octavo_server.router.proxy.request import DIALECTS, KINDS, UNCOUNTED, ProxyRequest
from octavo_server.router.proxy.retries import Retries, RetryBudget, retry_reason
from octavo_server.router.settings import RouterSettings
from octavo_server.router.upstream.headers import NOT_FORWARDED, Headers

if TYPE_CHECKING:
    from octavo_server.router.balance.lease import Lease
    from octavo_server.router.upstream.connection import UpstreamResponse

logger = logging.getLogger(__name__)

MALFORMED = "The request body is not a JSON object with a `model` that is a string: correct it."
NO_PROMPT = Prompt(num_tokens=1, affinity=0)
#: Class of an error -> value of the metric label `reason`; the first match counts.
REASONS = (
    (ClientLeft, "client left"),
    (ReplicaLost, "replica lost"),
    (ReplicaTimeout, "replica silent"),
    (RateLimited, "rate limited"),
    (Overloaded, "overloaded"),
    (Unavailable, "unavailable"),
)
#: A router that checks API keys, or sends its own key, does not forward the client's key.
NOT_FORWARDED_KEYED = NOT_FORWARDED | {b"authorization", b"x-api-key"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxyHandler:
    """`secret`: proves to replicas that the request comes from this router."""

    settings: RouterSettings
    fleet: Fleet
    prompts: PromptSource
    balancer: Balancer
    telemetry: RouterTelemetry
    lifecycle: Lifecycle
    in_flight: InFlight
    access: AccessPolicy
    cors: CorsPolicy
    secret: OutgoingSecret
    tenants: TenantsFile
    rate_limits: RateLimits
    budget: BodyBudget
    retry_budget: RetryBudget

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request_id = request_id_of(scope["headers"])
        downstream = Downstream(scope, receive, send, self.lifecycle, request_id=request_id, cors=self.cors)
        observer = self.telemetry.observe(downstream.request_id)
        self.lifecycle.begin_request()
        self.in_flight.add(downstream)
        try:
            await self._serve(downstream, observer, receive)
            observer.record_end(downstream.status or CLIENT_LEFT, "finished")
        except asyncio.CancelledError:
            if downstream.ended_by is None:
                raise
            await _fail(downstream, observer, downstream.ended_by)
        except Exception as error:  # noqa: BLE001  the request boundary
            await _fail(downstream, observer, error)
        finally:
            self.in_flight.discard(downstream)
            self.lifecycle.end_request()

    async def handle(self, request: ProxyRequest, downstream: Downstream) -> None:
        """Send the request to one replica after another until a response is final, and relay that response."""
        limits, hold_s = self.settings.forward, self._hold_s(downstream, request.model)
        retries = Retries(self.balancer, self.retry_budget, request.model, max_retries=limits.max_retries)
        while True:
            try:
                async with self.balancer.acquire(
                    request.model,
                    request.prompt,
                    tenant=request.tenant,
                    weight=request.weight,
                    exclude=retries.tried,
                    hold_s=hold_s,
                ) as lease:
                    hold_s -= lease.waited_s
                    request.admitted.record_sent(lease.replica.name)
                    request.observer.record_decision(request.prompt, lease.decision, lease.decision_s)
                    response = await lease.send(request.encode_for(lease.host), limits.first_byte_timeout)
                    if response.status >= 400:
                        request.admitted.forget()
                    if not await retries.should_retry_response(lease, response):
                        await self._relay(request, lease, response, downstream)
                        return
                    reason = f"status {response.status}"
            except ReplicaLost as error:
                request.admitted.forget()
                if downstream.has_started or not retries.should_retry_error(lease.replica, error):
                    raise
                reason = retry_reason(error)
            request.observer.record_retry(reason)

    async def _relay(
        self, request: ProxyRequest, lease: "Lease", response: "UpstreamResponse", downstream: Downstream
    ) -> None:
        response.limit_s = self.settings.forward.idle_timeout
        if not response.is_stream:
            await response.wait_complete()
        request.drop_body()
        self.balancer.record_first_byte(lease)
        request.observer.record_first_byte(cached_tokens(response), status=response.status)
        headers = client_headers(response, lease.decision, has_routing=self.settings.routing_headers)
        headers += [(name.encode(), value.encode()) for name, value in request.admitted.headers.items()]
        await relay(response, headers, downstream, request.admitted.end)

    async def _serve(self, downstream: Downstream, observer: RequestObserver, receive: Receive) -> None:
        await self.lifecycle.check_accepting(receive)
        scope = downstream.scope
        tenant = self.access.identify("POST", scope["path"], scope["headers"], port_of(scope)).tenant
        TENANT.set(tenant)
        limits = NO_LIMITS if scope["path"] in UNCOUNTED else self.tenants.limits(tenant)
        self.rate_limits.check(tenant, limits)  # refuse before the body is read
        with self.budget.reserve(tenant) as reservation:
            await self._serve_body(downstream, observer, reservation, limits)

    async def _serve_body(
        self, downstream: Downstream, observer: RequestObserver, reservation: BodyReservation, limits: TenantLimits
    ) -> None:
        scope, tenant = downstream.scope, reservation.tenant
        raw = await downstream.read_body(self.settings.limits, reservation)
        downstream.watch_disconnect()
        kind = KINDS.get(scope["path"])
        downstream.dialect = DIALECTS.get(kind, "chunks")
        model, prompt = await self._read(kind, raw, tenant, downstream, observer)
        without, extra = self._own_headers(downstream.headers, tenant, limits, observer)
        num_tokens = prompt.num_tokens
        if kind is not None:  # other routes may have no output
            num_tokens += prompt.expected_output_tokens
        with self.rate_limits.admit(tenant, limits, num_tokens) as admitted:
            request = ProxyRequest(
                target=downstream.target,
                headers=downstream.headers,
                body=raw,
                model=model,
                tenant=tenant,
                weight=limits.weight,
                admitted=admitted,
                prompt=prompt,
                observer=observer,
                without=without,
                extra=extra,
                reservation=reservation,
            )
            del raw
            await self.handle(request, downstream)

    async def _read(
        self, kind: RouteKind | None, raw: bytes, tenant: str, downstream: Downstream, observer: RequestObserver
    ) -> tuple[str, Prompt]:
        """Return the request's model and prompt. The parsed body takes many times the memory of `raw` and is freed."""
        fields = await self.prompts.parse(raw)
        name = _name_of(fields)
        if fields.is_malformed and not any(replica.is_routable for replica in self.fleet.replicas):
            raise MalformedRequest(MALFORMED)  # a malformed request is not held and starts no replica
        if not self.balancer.is_resolved(name):  # free the parsed body, as the wait may be long
            del fields
            await self.balancer.wait_resolved(name, tenant=tenant, hold_s=self._hold_s(downstream))
            fields = await self.prompts.parse(raw)
        model = self.balancer.resolve(name)
        observer.record_model(self.fleet.base_model(model))
        if kind is None:
            return model, NO_PROMPT
        return model, await self.prompts.hash_prompt(kind, fields, model=model, tenant=tenant)

    def _hold_s(self, downstream: Downstream, model: str = "") -> float:
        """Seconds for which the request may still wait for a replica. They count from its first byte, as the limits of
        clients and proxies do, so a slow upload doesn't extend the wait."""
        service, limit_s = self.fleet.listed_service(model), self.settings.forward.max_hold_time
        if service is not None and service.hold_s is not None:
            limit_s = min(limit_s, service.hold_s)
        return max(limit_s - (asyncio.get_running_loop().time() - downstream.begun_s), 0.0)

    def _own_headers(
        self, headers: Headers, tenant: str, limits: TenantLimits, observer: RequestObserver
    ) -> tuple[Collection[bytes], bytes]:
        """Return the names of client headers that are not forwarded, and the header lines that the router adds."""
        extra = f"x-request-id: {observer.request_id}\r\n"
        replica_key, secret = self.settings.replica_key, self.secret.current
        if secret:
            extra += f"{SECRET_HEADER}: {secret}\r\n{TENANT_HEADER}: {tenant}\r\n"
        if secret and self.tenants.is_given:
            extra += f"{WEIGHT_HEADER}: {limits.weight}\r\n"
            extra += f"{MAX_TOKENS_HEADER}: {limits.max_tokens}\r\n" if limits.max_tokens else ""
        if replica_key:
            extra += f"authorization: Bearer {replica_key}\r\n"
        without = NOT_FORWARDED if not self.access.has_keys and not replica_key else NOT_FORWARDED_KEYED
        tracer = self.telemetry.tracer
        if tracer is None:
            return without, extra.encode("latin-1")
        return observer.trace(tracer, headers, without=without, more=extra.encode("latin-1"))


def _name_of(fields: RequestFields) -> str | None:
    name = fields.body.get("model")
    return name if isinstance(name, str) else None


async def _fail(downstream: Downstream, observer: RequestObserver, error: Exception) -> None:
    observer.record_end(_code(downstream, error), _reason(error))
    if isinstance(error, ClientLeft):
        logger.info("request %s: the client left, aborting", downstream.request_id)
    else:
        log_failure(error, downstream.request_id)
    await downstream.fail(error)


def _code(downstream: Downstream, error: Exception) -> int:
    if downstream.status:
        return downstream.status
    return CLIENT_LEFT if isinstance(error, ClientLeft) else describe(error).status


def _reason(error: Exception) -> str:
    reason = next((text for kind, text in REASONS if isinstance(error, kind)), None)
    return reason or ("refused" if describe(error).status < 500 else "error")
