"""A pure ASGI layer that lets in only who has a key, and notes whose it is: `scope["state"]["tenant"]`.

Guarded is every path but those of `OPEN_PATHS`, which probes, scrapers and browsers ask without a key and which tell
nothing of any request. So a route that is added later is guarded unless somebody decides otherwise. Where there are
several keys, the routes of `ADMIN_PREFIXES` answer the one called "admin" only: they show or stop what others do.
"""

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from octavo_server.api_keys import ApiKeys
from octavo_server.json_responses import error_reply
from octavo_server.openai.errors import Forbidden, Unauthorized

OPEN_PATHS = frozenset(
    {"/health", "/ready", "/ping", "/version", "/load", "/metrics"}
    | {"/docs", "/docs/oauth2-redirect", "/redoc", "/openapi.json"}
)
ADMIN_PREFIXES = ("/drain", "/debug", "/reset_prefix_cache", "/server_info", "/kv")
ADMIN = "admin"


class BearerAuth:
    def __init__(self, app: ASGIApp, ring: ApiKeys) -> None:
        self._app = app
        self._ring = ring

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            if scope["type"] == "http" and is_guarded(scope) and not scope["state"].get("is_router"):
                scope["state"]["tenant"] = self._tenant(scope)
        except (Unauthorized, Forbidden) as error:
            await error_reply(error)(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _tenant(self, scope: Scope) -> str:
        """Raises Unauthorized or Forbidden."""
        scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
        tenant = self._ring.tenant_of(key.strip().encode("latin-1"))
        if tenant is None or scheme.lower() != "bearer":
            raise Unauthorized("Missing or wrong API key: send 'Authorization: Bearer KEY'.")
        if path_of(scope).startswith(ADMIN_PREFIXES) and tenant != ADMIN and len(self._ring) > 1:
            raise Forbidden(
                f"This route is the operator's: of several API keys, only the one named {ADMIN!r} may use it."
            )
        return tenant


def is_guarded(scope: Scope) -> bool:
    """A browser's question whether it may ask (CORS) carries no key."""
    return path_of(scope) not in OPEN_PATHS and scope["method"] != "OPTIONS"


def path_of(scope: Scope) -> str:
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))
