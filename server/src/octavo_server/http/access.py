"""Access to routes: one table and one policy for the engine's server and the router.

A caller is anonymous, a client (by an API key), the administrator (by the API key named `admin`), or a router (by the
secret that routers and replicas share). Every replica has that secret, so a router never takes it as a tenant's key;
it opens the router's admin routes, unless the router has an admin secret of its own for them. A server without keys and
without a secret is open to requests that name a host of `AllowedHosts`. Clients are denied every route that the table
doesn't list, so a new route is closed until the table lists it. A test calls every route of both servers and writes
docs/reference/access.md.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from octavo_engine.wire.errors import InvalidRequest
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo_server.anthropic.answer import VERSION
from octavo_server.anthropic.routes import COUNT_TOKENS, MESSAGES, RENDER, is_messages_path
from octavo_server.config import HttpSettings
from octavo_server.http.allowed_hosts import ANY, AllowedHosts
from octavo_server.http.api_keys import ApiKeys
from octavo_server.http.cors import CorsPolicy
from octavo_server.http.request_threads import TENANT
from octavo_server.http.router_secret import (
    MAX_TOKENS_HEADER,
    SECRET_HEADER,
    TENANT_HEADER,
    WEIGHT_HEADER,
    router_secrets,
)
from octavo_server.http.tenants_file import TenantLimits
from octavo_server.json_responses import error_reply
from octavo_server.openai.errors import Forbidden, Unauthorized

#: `probe` and `metrics` are open to everybody, `public` too unless the server runs with --router-only. With an admin
#: port, `admin` and `metrics` answer only there, `client` and `public` only on the main port, `probe` on both.
Kind = Literal["probe", "metrics", "public", "client", "admin", "router"]
RawHeaders = list[tuple[bytes, bytes]]

ROUTES: Mapping[str, Kind] = {
    **dict.fromkeys(("/health", "/ready", "/ping", "/version"), "probe"),
    "/metrics": "metrics",
    **dict.fromkeys(("/load", "/docs", "/docs/oauth2-redirect", "/redoc", "/openapi.json"), "public"),
    **dict.fromkeys(("/v1/chat/completions", "/v1/chat/completions/render", "/v1/completions"), "client"),
    "/v1/chat/completions/batch": "client",
    **dict.fromkeys(("/v1/completions/render", "/v1/responses", "/v1/embeddings", "/v1/models"), "client"),
    **dict.fromkeys(("/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank"), "client"),
    **dict.fromkeys((MESSAGES, RENDER, COUNT_TOKENS), "client"),
    **dict.fromkeys(("/tokenize", "/detokenize", "/invocations", "/tokenizer_info"), "client"),
    **dict.fromkeys(("/sleep", "/wake_up", "/is_sleeping"), "admin"),
    **dict.fromkeys(("/v1/load_lora_adapter", "/v1/unload_lora_adapter"), "admin"),
    **dict.fromkeys(("/drain", "/reset_prefix_cache", "/reset_mm_cache", "/server_info", "/state/events"), "admin"),
    **dict.fromkeys(("/debug/requests", "/debug/decisions", "/debug/decisions/ended", "/debug/index"), "admin"),
    **dict.fromkeys(("/kv/events", "/kv/snapshot", "/kv/model"), "router"),
}
#: Routes whose last part is a parameter.
PREFIXES: Mapping[str, Kind] = {"/v1/models/": "client", "/v1/responses/": "client"}

ADMIN = "admin"
NO_KEY = "Missing or wrong API key: send 'Authorization: Bearer KEY'."
NO_ADMIN_KEY = (
    f"This route is the administrator's: send 'Authorization: Bearer KEY' with the API key named {ADMIN!r} (a line "
    f"'{ADMIN}: KEY' in a file of --api-key-file), or the router's secret in the header {SECRET_HEADER}."
)
WRONG_SECRET = (
    f"The {SECRET_HEADER} header is wrong: give router and replica the same --router-secret, send a router its "
    "--admin-secret if it has one, or omit the header."
)
ROUTERS_ONLY = (
    "This server accepts requests of its router only (--router-only): send the request to the router, or send the "
    f"router's secret in the header {SECRET_HEADER}."
)
FOREIGN_ORIGIN = "Pages of other origins may not call this route: start the server with an API key to administer it."
FOREIGN_HOST = (
    "The Host {host!r} is unknown. A server without API keys answers only under IP addresses, localhost, the machine's "
    "name and the names of --allowed-hosts, as web pages could call it under a name of their own (DNS rebinding)."
)
MAX_HOST_CHARS = 100
MAX_TENANT_CHARS = 256
LONG_TENANT = (
    f"The {TENANT_HEADER} header has {{num_chars}} characters; the limit is {MAX_TENANT_CHARS}: send a shorter name."
)
_AUTHORIZATION, _SECRET, _TENANT = b"authorization", SECRET_HEADER.encode(), TENANT_HEADER.encode()
_ORIGIN, _HOST, _X_API_KEY, _VERSION = b"origin", b"host", b"x-api-key", VERSION.encode()
_WEIGHT, _MAX_TOKENS = WEIGHT_HEADER.encode(), MAX_TOKENS_HEADER.encode()


@dataclass(frozen=True, slots=True)
class Identity:
    """`limits`: the tenant's, as a router sends them."""

    tenant: str = ""
    is_admin: bool = False
    is_router: bool = False
    limits: TenantLimits | None = None


ANONYMOUS = Identity()


def kind_of(path: str) -> Kind | None:
    """Kind of a route, None for a path that the table doesn't list. `path` is without the root path.

    A path with a slash at its end has the kind of the path without it, to which the server redirects.
    """
    kind = ROUTES.get(path.removesuffix("/"))
    if kind is None:
        return next((kind for prefix, kind in PREFIXES.items() if path.startswith(prefix)), None)
    return kind


class AccessPolicy:
    """Decides who may call a route. It is cheap: it reads the raw headers once and hashes only the sent key."""

    def __init__(
        self,
        *,
        keys: ApiKeys | None = None,
        secrets: ApiKeys | None = None,
        is_router: bool = False,
        is_router_only: bool = False,
        admin_port: int | None = None,
        cors: CorsPolicy | None = None,
        hosts: AllowedHosts | None = None,
    ) -> None:
        self.has_keys = keys is not None
        self._keys = keys
        self._secrets = secrets
        self._is_open = keys is None and secrets is None
        self._serves_as_router = is_router
        self._is_router_only = is_router_only
        self._admin_port = admin_port
        self._cors = cors or CorsPolicy(allowed_origins=("*",))
        self._hosts = hosts or AllowedHosts((ANY,))

    def identify(self, method: str, path: str, headers: RawHeaders, port: int | None) -> Identity:
        """Return the caller. Raises Unauthorized, Forbidden, InvalidRequest for a long name of a tenant, and
        HTTPException(404) for a route hidden from it."""
        kind = kind_of(path)
        self._check_port(kind, port)
        if kind in ("probe", "metrics"):
            return ANONYMOUS
        sent = _read_headers(headers)
        if self._is_open:
            self._check_host(sent.get(_HOST), port)
        if (kind == "public" and not self._is_router_only) or (kind == "client" and self._is_open):
            return ANONYMOUS
        if self._serves_as_router and kind in ("client", "public"):
            sent.pop(_SECRET, None)
        if (is_messages_path(path) or _VERSION in sent) and _AUTHORIZATION not in sent:
            sent[_AUTHORIZATION] = b"Bearer " + sent.get(_X_API_KEY, b"")
        if self._is_router(sent):
            tenant = sent.get(_TENANT, b"").decode("latin-1")
            if len(tenant) > MAX_TENANT_CHARS:
                raise InvalidRequest(LONG_TENANT.format(num_chars=len(tenant)))
            limits = TenantLimits.of_headers(sent.get(_WEIGHT), sent.get(_MAX_TOKENS))
            return Identity(tenant, is_router=True, limits=limits)
        if self._is_router_only:
            raise Unauthorized(ROUTERS_ONLY)
        if kind in ("client", "public"):
            return self._client(sent)
        return self._administrator(kind, method, sent)

    def shows_internals(self, identity: Identity) -> bool:
        """True if responses may have `x-octavo-*` headers, which show which prompts other clients had cached."""
        return not self.has_keys or identity.is_router or identity.is_admin

    def _check_port(self, kind: Kind | None, port: int | None) -> None:
        if self._admin_port is None or kind == "probe":
            return
        if (port == self._admin_port) is (kind in ("client", "public")):
            raise HTTPException(404)

    def _check_host(self, host: bytes | None, port: int | None) -> None:
        if port is not None and not self._hosts.allows(host):
            raise Forbidden(FOREIGN_HOST.format(host=(host or b"").decode("latin-1")[:MAX_HOST_CHARS]))

    def _is_router(self, sent: Mapping[bytes, bytes]) -> bool:
        """True if the router's secret was sent. Raises Unauthorized for a wrong one: caches of tenants would mix."""
        secret = sent.get(_SECRET)
        if self._secrets is None or secret is None:
            return False
        if not secret or self._secrets.tenant_of(secret) is None:
            raise Unauthorized(WRONG_SECRET)
        return True

    def _client(self, sent: Mapping[bytes, bytes]) -> Identity:
        if self._keys is None:
            return ANONYMOUS
        name = self._key_name(sent)
        if name is None:
            raise Unauthorized(NO_KEY)
        return Identity(name, is_admin=name == ADMIN)

    def _administrator(self, kind: Kind | None, method: str, sent: Mapping[bytes, bytes]) -> Identity:
        if self._is_open:
            if method not in ("GET", "HEAD") and self._cors.is_foreign(sent.get(_ORIGIN), sent.get(_HOST)):
                raise Forbidden(FOREIGN_ORIGIN)
            return ANONYMOUS
        name = self._key_name(sent)
        if name == ADMIN:
            return Identity(ADMIN, is_admin=True)
        if kind is None and (name is not None or not self.has_keys):
            raise HTTPException(404)
        raise Unauthorized(NO_ADMIN_KEY) if name is None else Forbidden(NO_ADMIN_KEY)

    def _key_name(self, sent: Mapping[bytes, bytes]) -> str | None:
        scheme, _, key = sent.get(_AUTHORIZATION, b"").partition(b" ")
        key = key.strip()
        return self._keys.tenant_of(key) if self._keys is not None and key and scheme.lower() == b"bearer" else None


def access_policy(
    settings: HttpSettings,
    *,
    is_router: bool = False,
    is_router_only: bool = False,
    admin_port: int | None = None,
    admin_secrets: tuple[str, ...] = (),
) -> AccessPolicy:
    """Make the policy of a server. `admin_secrets`: a router's, in place of the one that its replicas share."""
    shared = (settings.router_secret, settings.router_secret_file)
    return AccessPolicy(
        keys=ApiKeys(settings.api_key, settings.api_key_file) if settings.needs_key else None,
        secrets=router_secrets(*((admin_secrets, None) if admin_secrets else shared)),
        is_router=is_router,
        is_router_only=is_router_only,
        admin_port=admin_port,
        cors=settings.cors,
        hosts=AllowedHosts(settings.allowed_hosts),
    )


def route_path(scope: Scope) -> str:
    """Path without the root path, by starlette's own rule: the access table and the routes must see the same path."""
    path: str = scope["path"]
    rest = path.removeprefix(scope.get("root_path", ""))
    return rest if not rest or rest.startswith("/") else path


def port_of(scope: Scope) -> int | None:
    server = scope.get("server")
    return server[1] if server else None


class AccessMiddleware:
    """Answers requests that the policy refuses, and stores the caller's tenant in the scope for the routes."""

    def __init__(self, app: ASGIApp, policy: AccessPolicy) -> None:
        self._app = app
        self._policy = policy

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            identity = self._policy.identify(scope["method"], route_path(scope), scope["headers"], port_of(scope))
        except (Unauthorized, Forbidden, InvalidRequest, HTTPException) as error:
            await error_reply(error, path=scope["path"])(scope, receive, send)
            return
        scope.setdefault("state", {}).update(tenant=identity.tenant, limits=identity.limits)
        TENANT.set(identity.tenant)
        await self._app(scope, receive, send if self._policy.shows_internals(identity) else _without_internals(send))


def _without_internals(send: Send) -> Send:
    async def send_filtered(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = [header for header in message["headers"] if not header[0].startswith(b"x-octavo-")]
            message = {**message, "headers": headers}
        await send(message)

    return send_filtered


def _read_headers(headers: RawHeaders) -> dict[bytes, bytes]:
    sent: dict[bytes, bytes] = {}
    for name, value in headers:
        if name in _READ and name not in sent:
            sent[name] = value
    return sent


_READ = frozenset({_AUTHORIZATION, _SECRET, _TENANT, _ORIGIN, _HOST, _X_API_KEY, _VERSION, _WEIGHT, _MAX_TOKENS})
