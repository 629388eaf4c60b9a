"""Routes for administrators: the state of each request, the engine's settings, resets of caches, and vLLM's `/sleep`,
which gives the memory of an idle engine back.

No response contains a prompt, an answer or a key.
"""

from dataclasses import asdict
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Query
from octavo_engine.wire.errors import InvalidRequest
from octavo_engine.wire.inspection import SequenceInfo
from octavo_engine.wire.sleep import check_mode, tags_of_level, tags_to_wake
from starlette.requests import Request
from starlette.responses import Response

from octavo_server.api.context import ApiContext, context_of
from octavo_server.api.openapi import answers
from octavo_server.json_responses import json_reply
from octavo_server.openai.errors import NotEnabled

router = APIRouter()

REFUSALS = (400, 401, 403, 404, 503)


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


@router.post("/sleep", **answers("Give the engine's memory back", None, refusals=(*REFUSALS, 409)))
async def sleep(request: Request, level: str = "1", mode: str = "abort") -> Response:
    """Level 1 frees the KV cache, level 2 the weights, too. Mode "abort" ends running requests, "wait" waits for their
    end."""
    context = _context_with_sleep_mode(request)
    number = int(level) if level.isdecimal() and level.isascii() else None
    if number is None:
        raise InvalidRequest(f"level={level} is not supported: use 1 or 2.", param="level")
    tags_of_level(number)
    await context.sleep_control.sleep(number, check_mode(mode))
    return Response()


@router.post("/wake_up", **answers("Restore the engine's memory", None, refusals=REFUSALS))
async def wake_up(request: Request, tags: Annotated[list[str] | None, Query()] = None) -> Response:
    context = _context_with_sleep_mode(request)
    await context.sleep_control.wake_up(tags_to_wake(tags))
    return Response()


@router.get("/is_sleeping", **answers("Whether any memory is given back", dict[str, bool], refusals=REFUSALS))
async def is_sleeping(request: Request) -> Response:
    context = _context_with_sleep_mode(request)
    return json_reply({"is_sleeping": bool(context.client.sleeping_tags)})


def _context_with_sleep_mode(request: Request) -> ApiContext:
    context = context_of(request)
    if not context.client.config.enable_sleep_mode:
        raise NotEnabled(request.url.path, "--enable-sleep-mode")
    return context
