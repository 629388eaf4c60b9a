"""Pure ASGI layers around the application: they touch a request's head and never its stream.

`RequestIdMiddleware` gives every request an id and echoes it.
"""

import uuid

from octavo_engine.log_format import REQUEST_ID
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

MAX_ID_CHARS = 256


class RequestIdMiddleware:
    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = usable_id(Headers(scope=scope).get("x-request-id", "")) or uuid.uuid4().hex
        scope.setdefault("state", {}).update(request_id=request_id, send_body=send)
        REQUEST_ID.set(request_id)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        await self._app(scope, receive, send_with_id)


def usable_id(given: str) -> str:
    """Empty for what a client's header shouldn't put into logs and answers."""
    return given if len(given) <= MAX_ID_CHARS and given.isascii() and given.isprintable() else ""
