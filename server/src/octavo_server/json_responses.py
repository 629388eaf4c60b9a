"""Whole JSON responses of both servers: a value, or an error in the form of the API that the path belongs to."""

from collections.abc import Mapping

import msgspec
from starlette.responses import Response
from starlette.types import Send

from octavo_server.anthropic.errors import error_body
from octavo_server.openai.errors import ApiError, describe

JSON_TYPE = (b"content-type", b"application/json")
RawHeaders = list[tuple[bytes, bytes]]


def json_reply(content: object) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json")


def error_reply(error: Exception, headers: Mapping[str, str] | None = None, *, path: str = "") -> Response:
    """Response for an error. `headers` are added to the headers of the error."""
    described = describe(error)
    head = {**described.headers, **(headers or {})}
    return Response(error_body(described, path), described.status, head, media_type="application/json")


def error_head(error: ApiError, body: bytes) -> RawHeaders:
    """All headers of the response that has this error as its body, in ASGI's form."""
    own = [(name.lower().encode(), value.encode("latin-1")) for name, value in error.headers.items()]
    return [JSON_TYPE, (b"content-length", b"%d" % len(body)), *own]


async def send_error(send: Send, error: ApiError, *, path: str = "") -> None:
    body = error_body(error, path)
    await send({"type": "http.response.start", "status": error.status, "headers": error_head(error, body)})
    await send({"type": "http.response.body", "body": body})
