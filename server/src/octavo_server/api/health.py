"""What probes, load balancers and Prometheus ask: health, ping, version, load, metrics."""

from importlib.metadata import version

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from octavo_server.api.context import context_of
from octavo_server.exposition import CONTENT_TYPE

router = APIRouter()


@router.get("/health", summary="200 while the engine gets on; 503 with a reason when not", response_model=None)
async def health(request: Request) -> Response:
    reason = context_of(request).unhealthy_reason
    return Response() if reason is None else JSONResponse({"status": "unhealthy", "reason": reason}, 503)


@router.get("/ping", summary="Health, as SageMaker asks for it", response_model=None)
async def ping(request: Request) -> Response:
    return await health(request)


@router.post("/ping", summary="Health, as SageMaker asks for it", response_model=None)
async def post_ping(request: Request) -> Response:
    return await health(request)


@router.get("/version", summary="The server's version", response_model=None)
async def show_version() -> Response:
    return JSONResponse({"version": version("octavo-server")})


@router.get("/load", summary="Requests at work", response_model=None)
async def load(request: Request) -> Response:
    return JSONResponse({"server_load": len(context_of(request).in_flight)})


@router.get("/metrics", summary="Prometheus metrics", response_model=None)
async def metrics(request: Request) -> Response:
    return Response(context_of(request).telemetry.exposition(), headers={"content-type": CONTENT_TYPE})
