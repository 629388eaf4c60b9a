"""Reads the body of a request: no more of it than allowed, and not for ever.

The size is checked while bytes come in, so a body of any length, declared or chunked, takes no more memory than the
limit; uvicorn stops reading from the socket while nobody takes what has come.
"""

import asyncio
import logging

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive

from octavo_server.config import RequestLimits
from octavo_server.openai.errors import MalformedRequest, RequestTimeout, RequestTooLarge

logger = logging.getLogger(__name__)

DISCARD_S = 5.0
DISCARD_BYTES = 2**24


async def read_bytes(request: Request, limits: RequestLimits) -> bytes:
    """Raises RequestTooLarge, RequestTimeout, and MalformedRequest for a client that left."""
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limits.max_request_bytes:
        raise RequestTooLarge(int(declared), limit=limits.max_request_bytes, is_all=True)
    try:
        async with asyncio.timeout(limits.request_timeout_s):
            return await _read(request, limits.max_request_bytes)
    except TimeoutError:
        raise RequestTimeout(
            f"The request body was not complete after {limits.request_timeout_s:g} s (--request-timeout)."
        ) from None
    except ClientDisconnect:
        request_id = request.scope["state"]["request_id"]
        logger.debug("request %s: the client left before the body was complete", request_id)
        raise MalformedRequest("The client left before the body was complete.") from None


async def _read(request: Request, max_bytes: int) -> bytes:
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > max_bytes:
            raise RequestTooLarge(len(body), limit=max_bytes, is_all=False)
    return bytes(body)


async def discard_body(receive: Receive) -> None:
    """Before an answer that ends the connection: closing it with bytes unread would reset it, and lose the answer."""
    num_bytes, more = 0, True
    try:
        async with asyncio.timeout(DISCARD_S):
            while more and num_bytes < DISCARD_BYTES:
                message = await receive()
                num_bytes += len(message.get("body", b""))
                more = message.get("more_body", False)
    except TimeoutError:
        return
