"""`request_id_of`: the id of a request, which logs, traces, replicas and the client have in common.

The client's own `x-request-id` is used where it can't forge a line of the log; every other request gets a new id.
`RequestIdMiddleware` notes the id for the layers below and sends it back.
"""

import random
import re

from octavo_engine.log_format import REQUEST_ID
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADER = b"x-request-id"
#: Visible ASCII without spaces, brackets, quotes and backslashes, so that an id is one word of a log line.
_USABLE = re.compile(rb"[!#-&*-;=?-Z^-z|~]{1,256}")


def request_id_of(headers: list[tuple[bytes, bytes]]) -> str:
    """The first `x-request-id` counts. The headers' names are lower case, as ASGI has them."""
    for name, value in headers:
        if name == HEADER:
            return value.decode("ascii") if _USABLE.fullmatch(value) else new_request_id()
    return new_request_id()


def new_request_id() -> str:
    return f"{random.getrandbits(128):032x}"


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
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        await self._app(scope, receive, send_with_id)
