"""Whole JSON responses: a value, and an error in OpenAI's envelope. Both applications answer with these."""

from collections.abc import Mapping

import msgspec
from starlette.responses import Response

from octavo_server.openai.errors import describe


def json_reply(content: object) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json")


def error_reply(error: Exception, headers: Mapping[str, str] | None = None) -> Response:
    """`headers` are added to those that belong to the error."""
    described = describe(error)
    head = {**described.headers, **(headers or {})}
    return Response(described.body(), described.status, head, media_type="application/json")
