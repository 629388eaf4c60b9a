"""`Proxy`: what happens to a request that is sent on to a replica, from its head to its one terminal event.

Bare ASGI: no framework is on this way. The prompt is read as the replicas would read it, so that its blocks are known;
what can't be read here goes to a replica anyway, which says what is wrong with it. This is the request boundary:
nothing is raised past it, and each request is counted once.
"""

import asyncio
import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from octavo_engine.wire.errors import ModelNotFound, Overloaded, Unavailable
from starlette.types import Receive, Scope, Send

from octavo_server.http.body import BodyBudget, discard_body
from octavo_server.http.lifecycle import RETRY_AFTER_S, Lifecycle
from octavo_server.http.responses import InFlight, log_failure
from octavo_server.http.router_secret import SECRET_HEADER, TENANT_HEADER, OutgoingSecret
from octavo_server.openai.errors import MalformedRequest, ReplicaLost, ReplicaTimeout, Unauthorized, describe
from octavo_server.router.fleet.fleet import Fleet
from octavo_server.router.observe.request_observer import Telemetry
from octavo_server.router.prompts.estimate import Kind
from octavo_server.router.prompts.prompt import Prompt
from octavo_server.router.prompts.prompt_source import PromptSource
from octavo_server.router.proxy.attempt import Job
from octavo_server.router.proxy.downstream import ClientLeft, Downstream, request_id_of
from octavo_server.router.proxy.forward import Forwarder
from octavo_server.router.settings import RouterSettings
from octavo_server.router.upstream.headers import NOT_SENT_ON, Headers, value_of

if TYPE_CHECKING:
    from octavo_server.api_keys import ApiKeys
    from octavo_server.router.observe.request_observer import RequestObserver

logger = logging.getLogger(__name__)

KINDS: Mapping[str, Kind] = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completion",
    "/v1/responses": "responses",
}
#: Sent on by their model alone.
OTHERS = frozenset(
    {"/tokenize", "/detokenize", "/v1/chat/completions/render", "/v1/completions/render", "/v1/embeddings"}
)
UNREAD = Prompt(num_tokens=1, affinity=0)
CLIENT_LEFT = 499
#: Where clients' keys are the router's own.
KEYED = NOT_SENT_ON | {b"authorization"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Proxy:
    """`ring`: None where no key is needed. `secret`: what replicas believe this router by."""

    settings: "RouterSettings"
    fleet: "Fleet"
    prompts: PromptSource
    body_budget: BodyBudget
    forwarder: Forwarder
    telemetry: "Telemetry"
    lifecycle: "Lifecycle"
    in_flight: "InFlight"
    ring: "ApiKeys | None"
    secret: OutgoingSecret

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request_id = request_id_of(scope["headers"])
        caller = Downstream(scope, receive, send, self.lifecycle, request_id=request_id)
        caller.track = self.telemetry.track(request_id)
        self.lifecycle.enter()
        self.in_flight.add(caller)
        try:
            await self._serve(caller, receive)
            _count(caller, None)
        except asyncio.CancelledError:
            if caller.ended_by is None:
                raise
            await self._fail(caller, caller.ended_by)
        except Exception as error:  # noqa: BLE001  the request boundary
            await self._fail(caller, error)
        finally:
            self.in_flight.discard(caller)
            self.lifecycle.leave()

    async def _serve(self, caller: Downstream, receive: Receive) -> None:
        if self.lifecycle.state != "accepting":
            await discard_body(receive)
            raise Unavailable("The router is draining: ask another one.", retry_after_s=RETRY_AFTER_S)
        scope, headers = caller.scope, caller.scope["headers"]
        tenant = "" if self.ring is None else tenant_of(headers, self.ring)
        with self.body_budget.reserve() as reservation:
            raw = await caller.body(self.settings.limits, reservation)
            caller.watch()
            kind = KINDS.get(scope["path"])
            caller.dialect = "events" if kind == "responses" else "chunks"
            track = caller.track
            assert track is not None
            model, prompt = await self._read(kind, raw, tenant, track)
            query = scope["query_string"]
            target = scope["raw_path"] + (b"?" + query if query else b"")
            job = self.job(target, headers, raw, tenant=tenant, track=track, model=model, prompt=prompt)
            await self.forwarder.forward(job, caller)

    async def _read(self, kind: Kind | None, raw: bytes, tenant: str, track: "RequestObserver") -> tuple[str, Prompt]:
        """The fields of the body are dropped here, before the response is awaited."""
        fields = await self.prompts.parse(raw)
        model = self._model(fields.body, track)
        if kind is None:
            return model, UNREAD
        return model, await self.prompts.prompt_of(kind, fields, model=model, tenant=tenant)

    def job(
        self,
        target: bytes,
        headers: Headers,
        body: bytes,
        *,
        tenant: str,
        track: "RequestObserver",
        model: str,
        prompt: Prompt,
    ) -> Job:
        without, more = self._said(tenant, track.request_id)
        tracer = self.telemetry.tracer
        if tracer is not None:
            without, more = track.trace(tracer, headers, without=without, more=more)
        return Job(
            target=target,
            headers=headers,
            track=track,
            model=model,
            body=body,
            prompt=prompt,
            more=more,
            without=without,
        )

    def _model(self, body: Mapping[str, Any], track: "RequestObserver") -> str:
        """Raises ModelNotFound; not while there are replicas of which it isn't known yet what they serve."""
        model = body.get("model")
        if isinstance(model, str) and self.fleet.routable(model):
            track.model = model
            return model
        known = self.fleet.models()
        if isinstance(model, str) and model:
            if model not in known and self.fleet.replicas and all(replica.models for replica in self.fleet.replicas):
                raise ModelNotFound(model)
            track.model = model if model in known else ""
            return model
        if not known:
            raise Unavailable("No replica is there yet. Send the request again later.", retry_after_s=RETRY_AFTER_S)
        if len({replica.models for replica in self.fleet.replicas if replica.models}) > 1:
            unread = "" if body else "No field could be read from the body. "
            raise MalformedRequest(f"{unread}`model` has to say which one: {', '.join(known)}.", param="model")
        track.model = known[0]
        return known[0]

    def _said(self, tenant: str, request_id: str) -> tuple[Collection[bytes], bytes]:
        """What is left out of the client's headers, and the lines that are added."""
        more = f"x-request-id: {request_id}\r\n"
        replica_key, secret = self.settings.replica_key, self.secret.current
        if secret:
            more += f"{SECRET_HEADER}: {secret}\r\n{TENANT_HEADER}: {tenant}\r\n"
        if replica_key:
            more += f"authorization: Bearer {replica_key}\r\n"
        return NOT_SENT_ON if self.ring is None and not replica_key else KEYED, more.encode("latin-1")

    async def _fail(self, caller: Downstream, error: Exception) -> None:
        _count(caller, error)
        if isinstance(error, ClientLeft):
            logger.info("request %s: the client left, aborting", caller.request_id)
        else:
            log_failure(error, caller.request_id)
        await caller.fail(error)


def tenant_of(headers: Headers, ring: "ApiKeys") -> str:
    """Raises Unauthorized."""
    scheme, _, key = value_of(headers, b"authorization").partition(b" ")
    tenant = ring.tenant_of(key.strip())
    if tenant is None or scheme.lower() != b"bearer":
        raise Unauthorized("Missing or wrong API key: send 'Authorization: Bearer KEY'.")
    return tenant


def _count(caller: Downstream, error: Exception | None) -> None:
    track = caller.track
    if track is not None:
        caller.track = None
        track.ended(_code(caller, error), _how(error))


def _code(caller: Downstream, error: Exception | None) -> int:
    if caller.status:
        return caller.status
    return CLIENT_LEFT if error is None or isinstance(error, ClientLeft) else describe(error).status


def _how(error: Exception | None) -> str:
    """One of few words: it is a label."""
    match error:
        case None:
            return "finished"
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
