"""`Proxy`: what happens to a request that is sent on to a replica, from its head to its one terminal event.

Bare ASGI: no framework is on this way. The prompt is read as the replicas would read it, so that its blocks are known;
what can't be read here goes to a replica anyway, which says what is wrong with it. This is the request boundary:
nothing is raised past it, and each request is counted once.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
from octavo_engine.wire.errors import ModelNotFound, Overloaded, Unavailable
from pydantic_core import from_json
from starlette.types import Receive, Scope, Send

from octavo_server.http.access import AccessPolicy, port_of
from octavo_server.http.cors import CorsPolicy
from octavo_server.http.in_flight import InFlight
from octavo_server.http.lifecycle import RETRY_AFTER_S, Lifecycle
from octavo_server.http.request_id import request_id_of
from octavo_server.http.responses import log_failure
from octavo_server.http.router_secret import SECRET_HEADER, TENANT_HEADER, OutgoingSecret
from octavo_server.openai.errors import MalformedRequest, ReplicaLost, ReplicaTimeout, describe
from octavo_server.router.fleet.fleet import Fleet
from octavo_server.router.observe.request_observer import Telemetry
from octavo_server.router.prompts.estimate import Kind, estimate
from octavo_server.router.prompts.prompt import Prompt
from octavo_server.router.proxy.attempt import Job
from octavo_server.router.proxy.downstream import ClientLeft, Downstream
from octavo_server.router.proxy.forward import Forwarder
from octavo_server.router.settings import RouterSettings
from octavo_server.router.upstream.headers import NOT_SENT_ON, Headers

if TYPE_CHECKING:
    from octavo_server.router.observe.request_observer import RequestObserver
    from octavo_server.router.prompts.prompt_hasher import PromptHasher

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
#: Longer bodies are read in a thread, so that the streams of others go on.
INLINE_BYTES = 16 * 1024
CLIENT_LEFT = 499
#: Where clients' keys are the router's own.
KEYED = NOT_SENT_ON | {b"authorization"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Proxy:
    """`secret`: what replicas believe this router by."""

    settings: "RouterSettings"
    fleet: "Fleet"
    readers: "Callable[[str], PromptHasher | None]"
    forwarder: Forwarder
    telemetry: "Telemetry"
    lifecycle: "Lifecycle"
    in_flight: "InFlight"
    access: AccessPolicy
    cors: CorsPolicy
    secret: OutgoingSecret

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request_id = request_id_of(scope["headers"])
        caller = Downstream(scope, receive, send, self.lifecycle, request_id=request_id, cors=self.cors)
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
        await self.lifecycle.check_accepting(receive)
        scope, headers = caller.scope, caller.scope["headers"]
        tenant = self.access.identify("POST", scope["path"], headers, port_of(scope)).tenant
        raw = await caller.body(self.settings.limits)
        caller.watch()
        kind = KINDS.get(scope["path"])
        caller.dialect = "events" if kind == "responses" else "chunks"
        body, is_plain = read_object(raw)
        track = caller.track
        assert track is not None
        model = self._model(body, track)
        prompt = UNREAD if kind is None else await self._prompt(kind, model if is_plain else None, raw, body, tenant)
        query = scope["query_string"]
        target = scope["raw_path"] + (b"?" + query if query else b"")
        job = self.job(target, headers, raw, tenant=tenant, track=track, model=model, prompt=prompt)
        await self.forwarder.forward(job, caller)

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

    async def _prompt(self, kind: Kind, model: str | None, raw: bytes, body: Mapping[str, Any], tenant: str) -> Prompt:
        """An estimate, if no reader of a model is to be asked."""
        reader = None if model is None else self.readers(model)
        if reader is None:
            return estimate(kind, body)
        if len(raw) <= INLINE_BYTES:
            return reader.read(kind, body, tenant)
        return await asyncio.to_thread(reader.read, kind, body, tenant)

    def _said(self, tenant: str, request_id: str) -> tuple[Collection[bytes], bytes]:
        """What is left out of the client's headers, and the lines that are added."""
        more = f"x-request-id: {request_id}\r\n"
        replica_key, secret = self.settings.replica_key, self.secret.current
        if secret:
            more += f"{SECRET_HEADER}: {secret}\r\n{TENANT_HEADER}: {tenant}\r\n"
        if replica_key:
            more += f"authorization: Bearer {replica_key}\r\n"
        return NOT_SENT_ON if not self.access.has_keys and not replica_key else KEYED, more.encode("latin-1")

    async def _fail(self, caller: Downstream, error: Exception) -> None:
        _count(caller, error)
        if isinstance(error, ClientLeft):
            logger.info("request %s: the client left, aborting", caller.request_id)
        else:
            log_failure(error, caller.request_id)
        await caller.fail(error)


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
