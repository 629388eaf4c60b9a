"""`GET /kv/events` and `GET /kv/snapshot`: the KV blocks that this replica holds, as hashes without tokens.

`GET /kv/model`: the data with which a router computes these hashes from a request.
"""

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing

from fastapi import APIRouter
from octavo_engine.wire.errors import InvalidRequest
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Send

from octavo_server.api.context import ApiContext, context_of
from octavo_server.api.openapi import answers
from octavo_server.http.in_flight import InFlight
from octavo_server.http.responses import CancellableResponse
from octavo_server.kv import card
from octavo_server.kv.frames import MEDIA_TYPE
from octavo_server.openai.sse import UNBUFFERED

router = APIRouter()

HEADERS = [(b"content-type", MEDIA_TYPE.encode()), *UNBUFFERED]


@router.get(
    "/kv/events",
    **answers(
        "A snapshot of the KV blocks, then every change (docs/reference/kv-stream.md)", MEDIA_TYPE, refusals=(400, 401)
    ),
)
async def kv_events(request: Request) -> Response:
    context = _context_with_stream(request)
    return FrameStream(context, request, context.kv.frames())


@router.get(
    "/kv/snapshot",
    **answers("A snapshot of the KV blocks (docs/reference/kv-stream.md)", MEDIA_TYPE, refusals=(400, 401)),
)
async def kv_snapshot(request: Request) -> Response:
    context = _context_with_stream(request)
    return FrameStream(context, request, _each(context.kv.snapshot()))


@router.get(
    "/kv/model",
    **answers(
        "Data to compute the block hashes of a request (docs/reference/kv-stream.md)",
        card.MEDIA_TYPE,
        refusals=(400, 401),
    ),
)
async def kv_model(request: Request) -> Response:
    return Response(_context_with_stream(request).model_card, media_type=card.MEDIA_TYPE)


class FrameStream(CancellableResponse):
    """A response that streams frames. It is not counted among the responses in flight, so it doesn't delay a drain."""

    def __init__(self, context: ApiContext, request: Request, frames: AsyncGenerator[bytes, None]) -> None:
        super().__init__(InFlight(), request.scope["state"]["request_id"])
        self._frames = frames

    async def _run(self, send: Send) -> None:
        await self._start(send, 200, HEADERS)
        async with aclosing(self._frames) as frames:
            async for frame in frames:
                await send({"type": "http.response.body", "body": frame, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


def _context_with_stream(request: Request) -> ApiContext:
    context = context_of(request)
    if not context.client.config.kv_stream:
        raise InvalidRequest("this server was started with --no-kv-stream, so it does not publish its KV blocks.")
    return context


async def _each(frames: Iterator[bytes]) -> AsyncGenerator[bytes, None]:
    for frame in frames:
        yield frame
