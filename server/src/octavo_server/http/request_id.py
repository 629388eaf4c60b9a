"""`request_id_of`: the id of a request, shared by logs, traces, replicas and the client.

The client's own `x-request-id` is used if it can't forge a log line; every other request gets a new id. A body's
`request_id`, which replaces both, must pass the same test.
`RequestIdMiddleware` stores the id for the inner layers and adds it to the response, with the headers of rate limits.
"""

import random
import re

from octavo_engine.log_format import REQUEST_ID
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo_server.anthropic.routes import is_messages_path

HEADER = b"x-request-id"
#: Visible ASCII without spaces, brackets, quotes and backslashes, so that an id is one word of a log line.
_USABLE = re.compile(r"[!#-&*-;=?-Z^-z|~]{1,256}")


def request_id_of(headers: list[tuple[bytes, bytes]]) -> str:
    """Return the first `x-request-id` if it is usable, else a new id. Header names are lower case, as in ASGI."""
    for name, value in headers:
        if name == HEADER:
            request_id = value.decode("latin-1")
            return request_id if is_usable(request_id) else new_request_id()
    return new_request_id()


def is_usable(request_id: str) -> bool:
    return _USABLE.fullmatch(request_id) is not None


def new_request_id() -> str:
    return f"{random.getrandbits(128):032x}"


def id_headers(path: str, request_id: str) -> dict[str, str]:
    """Response headers with the id: Anthropic's clients read it from `request-id`."""
    return dict.fromkeys(("x-request-id", "request-id") if is_messages_path(path) else ("x-request-id",), request_id)


class RequestIdMiddleware:
    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = request_id_of(scope["headers"])
        scope.setdefault("state", {}).update(request_id=request_id, send_body=send)
        REQUEST_ID.set(request_id)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                admitted = getattr(scope["state"].get("usage"), "admitted", None)
                limits = {} if admitted is None else admitted.headers
                MutableHeaders(scope=message).update({**id_headers(scope["path"], request_id), **limits})
            await send(message)

        await self._app(scope, receive, send_with_id)
