"""Pure ASGI layers around the application: they touch a request's head and never its stream.

`RequestId` gives every request an id and echoes it; `BearerAuth` guards the API under /v1, and what only the operator
should ask. Keys are compared as SHA-256 digests in constant time, and all of them, so that the time tells nothing.
"""

import hashlib
import secrets
import uuid
from collections.abc import Iterable

from octavo_engine.log_format import REQUEST_ID
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo_server.openai.errors import Unauthorized, describe

GUARDED_PREFIXES = ("/v1", "/debug", "/reset_prefix_cache", "/server_info")
MAX_ID_CHARS = 256


class RequestId:
    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        usable = 0 < len(given) <= MAX_ID_CHARS and given.isascii() and given.isprintable()
        request_id = given if usable else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id
        REQUEST_ID.set(request_id)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        await self._app(scope, receive, send_with_id)


class BearerAuth:
    def __init__(self, app: ASGIApp, keys: Iterable[str]) -> None:
        self._app = app
        self._digests = [_digest(key.encode()) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._is_guarded(scope) and not self._is_authorised(scope):
            error = describe(Unauthorized("Missing or wrong API key: send 'Authorization: Bearer KEY'."))
            headers = {"www-authenticate": "Bearer"}
            response = Response(error.body(), error.status, headers, media_type="application/json")
            await response(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _is_guarded(self, scope: Scope) -> bool:
        path: str = scope["path"].removeprefix(scope.get("root_path", ""))
        return path.startswith(GUARDED_PREFIXES) and scope["method"] != "OPTIONS"

    def _is_authorised(self, scope: Scope) -> bool:
        scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
        given = _digest(key.strip().encode("latin-1"))
        matches = [secrets.compare_digest(given, digest) for digest in self._digests]
        return scheme.lower() == "bearer" and any(matches)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
