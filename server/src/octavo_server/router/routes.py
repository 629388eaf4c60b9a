"""The routes that a router shares with the engine's server: models, health, load, version, drain.

`/v1/models` lists the models of all replicas. FastAPI serves these routes: its cost doesn't matter, as forwarded
requests bypass it.
"""

from contextlib import suppress
from dataclasses import dataclass

from fastapi import APIRouter
from octavo_engine.wire.errors import ModelNotFound, Unavailable
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from octavo_server.anthropic.answer import VERSION, model_info, model_page
from octavo_server.http.lifecycle import Lifecycle, drain_reply
from octavo_server.json_responses import json_reply
from octavo_server.openai.errors import NotCompacted, NotStored
from octavo_server.openai.models import ModelList, ModelObject, permission
from octavo_server.router.balance.balancer import Balancer
from octavo_server.router.fleet.fleet import Fleet
from octavo_server.router.observe.workers import WorkerGroup
from octavo_server.router.proxy.request import KINDS, OTHERS

router = APIRouter()


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceContext:
    fleet: Fleet
    lifecycle: Lifecycle
    balancer: Balancer
    group: WorkerGroup
    max_hold_s: float
    created: int


def _context(request: Request) -> ServiceContext:
    context: ServiceContext = request.app.state.service
    return context


@router.head("/health")
@router.get("/health")
@router.head("/ping")
@router.get("/ping")
@router.post("/ping")
async def health() -> Response:
    """Return 200 while the router works: failing replicas are no reason to restart it."""
    return Response()


@router.head("/ready")
@router.get("/ready")
async def ready(request: Request) -> Response:
    """Return 200 while the router accepts requests and enough replicas take them (`Fleet.unready_reason`)."""
    context = _context(request)
    state, reason = context.lifecycle.state, context.fleet.unready_reason
    is_ready = state == "accepting" and reason is None
    return JSONResponse({"ready": is_ready, "state": state, "reason": reason}, 200 if is_ready else 503)


@router.get("/version")
async def show_version(request: Request) -> Response:
    return JSONResponse({"version": request.app.version})


@router.get("/load")
async def load(request: Request) -> Response:
    return JSONResponse({"server_load": _context(request).lifecycle.num_requests})


@router.get("/v1/models")
async def list_models(request: Request) -> Response:
    """List the models, after a wait of at most `max_hold_s` for the first replica that reports its models."""
    context = _context(request)
    with suppress(Unavailable):
        await context.balancer.wait_resolved(None, hold_s=context.max_hold_s)
    cards = [_card(context, name) for name in context.fleet.models()]
    return json_reply(model_page(cards) if VERSION in request.headers else ModelList(cards))


@router.get("/v1/models/{model:path}")
async def retrieve_model(request: Request, model: str) -> Response:
    context = _context(request)
    if model not in context.fleet.models():
        raise ModelNotFound(model)
    card = _card(context, model)
    return json_reply(model_info(card) if VERSION in request.headers else card)


@router.get("/v1/responses/{response_id}")
@router.get("/v1/responses/{response_id}/input_items")
@router.delete("/v1/responses/{response_id}")
@router.post("/v1/responses/{response_id}/cancel")
async def stored_response(response_id: str) -> Response:
    raise NotStored(response_id)


@router.post("/v1/responses/compact")
async def compact_response() -> Response:
    raise NotCompacted


async def forwarded() -> Response:
    """Never runs: the proxy handles every POST to these paths. The route makes other methods answer 405."""
    raise AssertionError("a POST that the proxy handles reached the router's own routes")


for path in (*KINDS, *sorted(OTHERS)):
    router.add_api_route(path, forwarded, methods=["POST"])


@router.get("/drain")
async def show_drain(request: Request) -> Response:
    return drain_reply(_context(request).lifecycle)


@router.post("/drain")
async def drain(request: Request) -> Response:
    context = _context(request)
    context.lifecycle.drain()
    context.group.drain()
    return drain_reply(context.lifecycle)


@router.delete("/drain")
async def resume(request: Request) -> Response:
    context = _context(request)
    context.group.resume()
    return drain_reply(context.lifecycle, is_done=context.lifecycle.resume())


def _card(context: ServiceContext, name: str) -> ModelObject:
    reported = (replica.max_model_len(name) for replica in context.fleet.replicas)
    lengths = [length for length in reported if length is not None]
    bases = [sorted(r.models)[0] for r in context.fleet.replicas if name in r.adapters and r.models]
    return ModelObject(
        name,
        context.created,
        root=name,
        parent=min(bases, default=None),
        max_model_len=min(lengths, default=None),
        permission=[permission(name, context.created)],
    )
