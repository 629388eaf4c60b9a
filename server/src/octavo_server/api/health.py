"""Routes for probes, load balancers and Prometheus: health, ping, ready, drain, version, load, metrics.

With `/ready` and `/drain`, a platform such as Kubernetes drains a server before it ends, or cancels a drain.
"""

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from octavo_server.api.context import context_of
from octavo_server.api.openapi import TEXT, answers
from octavo_server.http.lifecycle import drain_reply
from octavo_server.prometheus_text import CONTENT_TYPE

router = APIRouter()

STATE = dict[str, Any]


@router.head("/health", include_in_schema=False)
@router.get(
    "/health",
    **answers("Status 200 while the engine makes progress, else 503 with reason", None, unavailable=dict[str, str]),
)
async def health(request: Request) -> Response:
    reason = context_of(request).unhealthy_reason
    return Response() if reason is None else JSONResponse({"status": "unhealthy", "reason": reason}, 503)


@router.head("/ping", include_in_schema=False)
@router.get("/ping", **answers("Health in the form that SageMaker requests", None, unavailable=dict[str, str]))
async def ping(request: Request) -> Response:
    return await health(request)


@router.post("/ping", **answers("Health in the form that SageMaker requests", None, unavailable=dict[str, str]))
async def post_ping(request: Request) -> Response:
    return await health(request)


@router.head("/ready", include_in_schema=False)
@router.get(
    "/ready",
    **answers("Status 200 while the server accepts requests, else 503 with reason", STATE, unavailable=STATE),
)
async def ready(request: Request) -> Response:
    """A platform stops sending requests to a server if `/ready` fails, and restarts the server if `/health` fails."""
    context = context_of(request)
    state, reason = context.lifecycle.state, context.unhealthy_reason
    is_ready = state == "accepting" and reason is None
    return JSONResponse({"ready": is_ready, "state": state, "reason": reason}, 200 if is_ready else 503)


@router.get("/drain", **answers("Whether the server accepts requests, and how many are running", STATE))
async def show_drain(request: Request) -> Response:
    return drain_reply(context_of(request).lifecycle)


@router.post("/drain", include_in_schema=False)
async def drain(request: Request) -> Response:
    """Reject new requests; running ones may finish. The OpenAPI document omits this route of administrators."""
    lifecycle = context_of(request).lifecycle
    lifecycle.drain()
    return drain_reply(lifecycle)


@router.delete("/drain", include_in_schema=False)
async def resume(request: Request) -> Response:
    lifecycle = context_of(request).lifecycle
    return drain_reply(lifecycle, is_done=lifecycle.resume())


@router.get("/version", **answers("The server's version", dict[str, str]))
async def show_version(request: Request) -> Response:
    return JSONResponse({"version": request.app.version})


@router.get("/load", **answers("Requests in progress", dict[str, int]))
async def load(request: Request) -> Response:
    return JSONResponse({"server_load": len(context_of(request).in_flight)})


@router.get("/metrics", **answers("Prometheus metrics", TEXT))
async def metrics(request: Request) -> Response:
    return Response(context_of(request).telemetry.exposition(), headers={"content-type": CONTENT_TYPE})
