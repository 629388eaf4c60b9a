"""The routes for whoever runs the router: `/metrics`, `/debug/decisions`, `/debug/index`, `/state/events`.

FastAPI: none of them is on the way of a request. `AdminContext` is what they look at; the composition makes it. Whoever
may not read gets the error that `authorize` raises; `/metrics` is open, as it tells nothing of any request.
"""

from collections.abc import Callable
from dataclasses import dataclass

import msgspec
from fastapi import APIRouter, FastAPI
from octavo_engine.wire.errors import InvalidRequest, OctavoError
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from octavo_server.exposition import CONTENT_TYPE
from octavo_server.openai.errors import describe
from octavo_server.router.debug import Decisions, IndexDebug, decision_info
from octavo_server.router.gauges import gauges, index_info
from octavo_server.router.prefix_index import PrefixIndex
from octavo_server.router.state import RouterState
from octavo_server.router.state_events import StateFeed, StateStream
from octavo_server.router.track import Telemetry

MAX_DECISIONS = 1000

router = APIRouter()


@dataclass(frozen=True, slots=True, kw_only=True)
class AdminContext:
    """`authorize`: raises Unauthorized or Forbidden for a request that may not read what is the operator's."""

    telemetry: Telemetry
    index: PrefixIndex
    state: Callable[[], RouterState]
    feed: StateFeed
    authorize: Callable[[Scope], None]


def build_admin(context: AdminContext) -> FastAPI:
    app = FastAPI(title="Octavo router", openapi_url=None, docs_url=None, redoc_url=None)
    app.state.context = context
    app.include_router(router)
    app.add_exception_handler(OctavoError, _refuse)
    return app


def _context(request: Request) -> AdminContext:
    context: AdminContext = request.app.state.context
    return context


def _operators(request: Request) -> AdminContext:
    context = _context(request)
    context.authorize(request.scope)
    return context


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    context = _context(request)
    text = context.telemetry.metrics.text(gauges(context.state(), index_info(context.index)))
    return Response(text, headers={"content-type": CONTENT_TYPE})


@router.get("/debug/decisions")
async def debug_decisions(request: Request, n: str = "20") -> Response:
    log = _operators(request).telemetry.decisions
    return _json(Decisions([decision_info(entry) for entry in log.latest(_number(n))]))


@router.get("/debug/index")
async def debug_index(request: Request) -> Response:
    context = _operators(request)
    return _json(IndexDebug(index_info(context.index), [*context.state().replicas]))


@router.get("/state/events")
async def state_events(request: Request) -> Response:
    return StateStream(_operators(request).feed.frames())


def _number(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text[:9]) <= MAX_DECISIONS:
        raise InvalidRequest(f"n is {text[:20]!r}; it may be from 1 to {MAX_DECISIONS}.", param="n")
    return int(text)


def _json(content: object) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json")


async def _refuse(_: Request, error: Exception) -> Response:
    described = describe(error)
    return Response(described.body(), described.status, described.headers, media_type="application/json")
