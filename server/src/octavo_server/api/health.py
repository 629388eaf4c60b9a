"""Routes for probes, load balancers and Prometheus: health, ping, version, load, metrics."""

from importlib.metadata import version

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from octavo_server.api.context import context_of
from octavo_server.api.openapi import TEXT, answers
from octavo_server.prometheus_text import CONTENT_TYPE

router = APIRouter()


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


@router.get("/version", **answers("The server's version", dict[str, str]))
async def show_version() -> Response:
    return JSONResponse({"version": version("octavo-server")})


@router.get("/load", **answers("Requests in progress", dict[str, int]))
async def load(request: Request) -> Response:
    return JSONResponse({"server_load": len(context_of(request).in_flight)})


@router.get("/metrics", **answers("Prometheus metrics", TEXT))
async def metrics(request: Request) -> Response:
    return Response(context_of(request).telemetry.exposition(), headers={"content-type": CONTENT_TYPE})
