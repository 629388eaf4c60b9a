"""`/sleep`, `/wake_up`, `/is_sleeping`: administrators give an idle engine's memory back, as in vLLM."""

from typing import Annotated

from fastapi import APIRouter, Query
from octavo_engine.wire.errors import InvalidRequest
from octavo_engine.wire.sleep import check_mode, tags_of_level, tags_to_wake
from starlette.requests import Request
from starlette.responses import Response

from octavo_server.api.context import ApiContext, context_of
from octavo_server.api.openapi import answers
from octavo_server.json_responses import json_reply
from octavo_server.openai.errors import NotEnabled

router = APIRouter()

REFUSALS = (400, 401, 403, 404, 503)


@router.post("/sleep", **answers("Give the engine's memory back", None, refusals=(*REFUSALS, 409)))
async def sleep(request: Request, level: str = "1", mode: str = "abort") -> Response:
    """Level 1 gives the KV cache back, level 2 the weights, too. Mode "abort" ends running requests, "wait" waits for
    them."""
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
