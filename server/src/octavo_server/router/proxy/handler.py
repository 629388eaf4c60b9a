"""`ProxyHandler`: a client's request from its head to its one terminal event, on bare ASGI.

The prompt is hashed as the replicas hash it, so that the router knows which of them hold its blocks. A body that can't
be read here goes to a replica all the same, which answers with what is wrong. This is the request boundary: no error
passes it, and each request is counted once.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
from octavo_engine.wire.errors import Overloaded, Unavailable
from pydantic_core import from_json
from starlette.types import Receive, Scope, Send

from octavo_server.http.access import AccessPolicy, port_of
from octavo_server.http.body import BodyBudget, BodyReservation
from octavo_server.http.cors import CorsPolicy
from octavo_server.http.in_flight import InFlight
from octavo_server.http.lifecycle import Lifecycle
from octavo_server.http.request_id import request_id_of
from octavo_server.http.responses import log_failure
from octavo_server.http.router_secret import SECRET_HEADER, TENANT_HEADER, OutgoingSecret
from octavo_server.openai.errors import ReplicaLost, ReplicaTimeout, describe
from octavo_server.router.balance.balancer import Balancer
from octavo_server.router.fleet.fleet import Fleet
from octavo_server.router.observe.request_observer import RequestObserver, RouterTelemetry
from octavo_server.router.prompts.estimate import Kind, estimate
from octavo_server.router.prompts.prompt import Prompt
from octavo_server.router.proxy.downstream import ClientLeft, Downstream
from octavo_server.router.proxy.relay import cached_tokens, client_headers, relay
from octavo_server.router.proxy.request import ProxyRequest
from octavo_server.router.proxy.retries import Retries, retry_reason
from octavo_server.router.settings import RouterSettings
from octavo_server.router.upstream.headers import NOT_FORWARDED, Headers

if TYPE_CHECKING:
    from octavo_server.router.balance.lease import Lease
    from octavo_server.router.prompts.prompt_hasher import PromptHasher
    from octavo_server.router.upstream.connection import UpstreamResponse

logger = logging.getLogger(__name__)

#: Routes whose prompt is hashed.
KINDS: Mapping[str, Kind] = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completion",
    "/v1/responses": "responses",
}
#: Routes that are routed by their model alone.
OTHERS = frozenset(
    {"/tokenize", "/detokenize", "/v1/chat/completions/render", "/v1/completions/render", "/v1/responses/render"}
    | {"/v1/embeddings"}
)
NO_PROMPT = Prompt(num_tokens=1, affinity=0)
#: Longer bodies are hashed in a thread, so that the streams of other requests go on.
INLINE_BYTES = 16 * 1024
CLIENT_LEFT = 499
#: Where the router checks the clients' keys, replicas never see them.
NOT_FORWARDED_KEYED = NOT_FORWARDED | {b"authorization"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxyHandler:
    """`secret`: proves to replicas that the request comes from this router."""

    settings: RouterSettings
    fleet: Fleet
    hashers: "Callable[[str], PromptHasher | None]"
    balancer: Balancer
    telemetry: RouterTelemetry
    lifecycle: Lifecycle
    in_flight: InFlight
    access: AccessPolicy
    cors: CorsPolicy
    secret: OutgoingSecret
    budget: BodyBudget

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request_id = request_id_of(scope["headers"])
        downstream = Downstream(scope, receive, send, self.lifecycle, request_id=request_id, cors=self.cors)
        observer = self.telemetry.observe(downstream.request_id)
        self.lifecycle.enter()
        self.in_flight.add(downstream)
        try:
            with self.budget.reserve() as reservation:
                await self._serve(downstream, observer, receive, reservation)
            observer.ended(downstream.status or CLIENT_LEFT, "finished")
        except asyncio.CancelledError:
            if downstream.ended_by is None:
                raise
            await _fail(downstream, observer, downstream.ended_by)
        except Exception as error:  # noqa: BLE001  the request boundary
            await _fail(downstream, observer, error)
        finally:
            self.in_flight.discard(downstream)
            self.lifecycle.leave()

    async def handle(self, request: ProxyRequest, downstream: Downstream) -> None:
        """Send the request to one replica after another until one answers, and pass that answer on."""
        limits, hold_s = self.settings.forward, self.settings.forward.max_hold_s
        retries = Retries(self.balancer, request.model, max_retries=limits.max_retries)
        while True:
            try:
                async with self.balancer.acquire(
                    request.model, request.prompt, exclude=retries.tried, hold_s=hold_s
                ) as lease:
                    hold_s -= lease.waited_s
                    request.observer.decided(request.prompt, lease.decision, lease.decision_s)
                    response = await lease.send(request.encode_for(lease.host), limits.first_byte_timeout_s)
                    if not await retries.retries_response(lease, response):
                        await self._relay(request, lease, response, downstream)
                        return
                    reason = f"status {response.status}"
            except ReplicaLost as error:
                if downstream.has_started or not retries.retries_error(lease.replica, error):
                    raise
                reason = retry_reason(error)
            request.observer.retried(reason)

    async def _relay(
        self, request: ProxyRequest, lease: "Lease", response: "UpstreamResponse", downstream: Downstream
    ) -> None:
        response.limit_s = self.settings.forward.idle_timeout_s
        if not response.is_stream:
            await response.wait_complete()
        request.drop_body()
        self.balancer.record_first_byte(lease)
        request.observer.first_byte(cached_tokens(response))
        headers = client_headers(response, lease.decision, has_routing=self.settings.routing_headers)
        await relay(response, headers, downstream)

    async def _serve(
        self, downstream: Downstream, observer: RequestObserver, receive: Receive, reservation: BodyReservation
    ) -> None:
        await self.lifecycle.check_accepting(receive)
        scope = downstream.scope
        tenant = self.access.identify("POST", scope["path"], scope["headers"], port_of(scope)).tenant
        raw = await downstream.read_body(self.settings.limits, reservation)
        downstream.watch()
        kind = KINDS.get(scope["path"])
        downstream.dialect = "events" if kind == "responses" else "chunks"
        model, prompt = await self._read(kind, raw, tenant, observer)
        without, extra = self._own_headers(downstream.headers, tenant, observer)
        request = ProxyRequest(
            target=downstream.target,
            headers=downstream.headers,
            body=raw,
            model=model,
            prompt=prompt,
            observer=observer,
            without=without,
            extra=extra,
            reservation=reservation,
        )
        del raw
        await self.handle(request, downstream)

    async def _read(self, kind: Kind | None, raw: bytes, tenant: str, observer: RequestObserver) -> tuple[str, Prompt]:
        """Model and prompt of the request."""
        body, is_plain = read_object(raw)
        name = body.get("model")
        model = await self.balancer.resolve(
            name if isinstance(name, str) else None, hold_s=self.settings.forward.max_hold_s
        )
        observer.model = model
        if kind is None:
            return model, NO_PROMPT
        hasher = self.hashers(model) if is_plain else None
        if hasher is None:
            return model, estimate(kind, body)
        if len(raw) <= INLINE_BYTES:
            return model, hasher.read(kind, body, tenant)
        return model, await asyncio.to_thread(hasher.read, kind, body, tenant)

    def _own_headers(self, headers: Headers, tenant: str, observer: RequestObserver) -> tuple[Collection[bytes], bytes]:
        """Names of the client's headers that stay behind, and the header lines that the router adds."""
        extra = f"x-request-id: {observer.request_id}\r\n"
        replica_key, secret = self.settings.replica_key, self.secret.current
        if secret:
            extra += f"{SECRET_HEADER}: {secret}\r\n{TENANT_HEADER}: {tenant}\r\n"
        if replica_key:
            extra += f"authorization: Bearer {replica_key}\r\n"
        without = NOT_FORWARDED if not self.access.has_keys and not replica_key else NOT_FORWARDED_KEYED
        tracer = self.telemetry.tracer
        if tracer is None:
            return without, extra.encode("latin-1")
        return observer.trace(tracer, headers, without=without, more=extra.encode("latin-1"))


def read_object(raw: bytes) -> tuple[Mapping[str, Any], bool]:
    """Empty for what is no JSON object: a replica says what is wrong with it. False: only a replica's parser reads it,
    which takes NaN and Infinity, too; our caches know things by their JSON, in which there are no such numbers.
    """
    is_plain = True
    try:
        body = msgspec.json.decode(raw)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        is_plain = False
        try:
            body = from_json(raw)
        except ValueError:
            return {}, False
    return (body if isinstance(body, dict) else {}), is_plain


async def _fail(downstream: Downstream, observer: RequestObserver, error: Exception) -> None:
    observer.ended(_code(downstream, error), _reason(error))
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
    """Value of the metric label `reason`."""
    match error:
        case ClientLeft():
            return "client left"
        case ReplicaLost():
            return "replica lost"
        case ReplicaTimeout():
            return "replica silent"
        case Overloaded():
            return "overloaded"
        case Unavailable():
            return "unavailable"
    return "refused" if describe(error).status < 500 else "error"
