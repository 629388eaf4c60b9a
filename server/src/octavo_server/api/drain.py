"""`/ready`, and `/drain`: for a platform that empties a server before it ends it, or changes its mind."""

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from octavo_server.api.context import context_of
from octavo_server.api.openapi import answers

router = APIRouter()

STATE = dict[str, Any]


@router.head("/ready", include_in_schema=False)
@router.get(
    "/ready", **answers("200 while requests are taken, 503 with the reason otherwise", STATE, unavailable=STATE)
)
async def ready(request: Request) -> Response:
    """Unlike `/health`, which asks for a restart, this only asks for no more traffic."""
    context = context_of(request)
    state, reason = context.lifecycle.state, context.unhealthy_reason
    is_ready = state == "accepting" and reason is None
    return JSONResponse({"ready": is_ready, "state": state, "reason": reason}, 200 if is_ready else 503)


@router.get("/drain", **answers("Whether new requests are taken, and how many are running", STATE))
async def show_drain(request: Request) -> Response:
    lifecycle = context_of(request).lifecycle
    remaining_s = None if lifecycle.remaining_s is None else round(lifecycle.remaining_s, 3)
    return JSONResponse({"state": lifecycle.state, "running": lifecycle.num_requests, "remaining_s": remaining_s})


@router.post("/drain", include_in_schema=False)
async def drain(request: Request) -> Response:
    """Take no more requests; running ones may finish. Not in the document that clients are made from."""
    context_of(request).lifecycle.drain()
    return await show_drain(request)


@router.delete("/drain", include_in_schema=False)
async def resume(request: Request) -> Response:
    """Take requests again; 409 for a server that was told to end."""
    context_of(request).lifecycle.resume()
    answer = await show_drain(request)
    answer.status_code = 409 if context_of(request).lifecycle.state == "stopping" else 200
    return answer
