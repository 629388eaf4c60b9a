"""Routes for administrators: the state of each request, the engine's settings, and resets of caches.

No response contains a prompt, an answer or a key.
"""

from dataclasses import asdict
from typing import Any

import msgspec
from fastapi import APIRouter
from octavo_engine.wire.inspection import SequenceInfo
from starlette.requests import Request
from starlette.responses import Response

from octavo_server.api.context import context_of
from octavo_server.api.openapi import answers
from octavo_server.json_responses import json_reply

router = APIRouter()


class DebugRequests(msgspec.Struct):
    """Body of `GET /debug/requests`. `sequences`: the running ones, then the waiting ones in the engine's order."""

    running: int
    waiting: int
    sequences: list[SequenceInfo]


class ResetAnswer(msgspec.Struct, omit_defaults=True):
    reset: bool
    reason: str | None = None


IN_USE = "unfinished requests use blocks, so the cache was not reset: try again when /debug/requests is empty."


@router.get(
    "/debug/requests",
    **answers("Running sequences, and waiting ones with the reason why they wait", DebugRequests, refusals=(503,)),
)
async def debug_requests(request: Request) -> Response:
    sequences = await context_of(request).client.debug_requests()
    running = sum(info.state == "running" for info in sequences)
    return json_reply(DebugRequests(running, len(sequences) - running, sequences))


@router.post("/reset_prefix_cache", **answers("Empty the prefix cache", ResetAnswer, refusals=(503,)))
async def reset_prefix_cache(request: Request) -> Response:
    """The status is always 200, as in vLLM; the body says whether the cache was reset."""
    done = await context_of(request).client.reset_prefix_cache()
    return json_reply(ResetAnswer(done, None if done else IN_USE))


@router.post("/reset_mm_cache", **answers("Empty the cache of processed images", ResetAnswer, refusals=(503,)))
async def reset_mm_cache(request: Request) -> Response:
    """Images that unfinished requests need stay."""
    await context_of(request).client.reset_mm_cache()
    return json_reply(ResetAnswer(reset=True))


@router.get("/server_info", **answers("Version and engine settings", dict[str, Any]))
async def server_info(request: Request) -> Response:
    client = context_of(request).client
    ready = {name: value for name, value in asdict(client.ready_info).items() if name != "hash_root"}
    return json_reply({"version": request.app.version, "engine_config": asdict(client.config), "engine": ready})
