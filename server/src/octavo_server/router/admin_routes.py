"""The routes of a router for administrators and scrapers: `/metrics`, `/debug/decisions` (and `/ended`),
`/debug/index`, `/state/events`.

FastAPI serves these routes: its cost doesn't matter, as forwarded requests bypass it. Each response covers all workers
of the router. `http/access.py` has checked the caller's access before.
"""

from dataclasses import dataclass
from importlib.metadata import version

from fastapi import APIRouter, FastAPI
from octavo_engine.wire.errors import InvalidRequest, OctavoError
from starlette.requests import Request
from starlette.responses import Response

from octavo_server.json_responses import error_reply, json_reply
from octavo_server.prometheus_text import CONTENT_TYPE
from octavo_server.router.observe.debug import Decisions, IndexDebug
from octavo_server.router.observe.report import ReportQuery, exposition, latest_decisions, merged_index, merged_state
from octavo_server.router.observe.state_stream import StateFeed, StateStream
from octavo_server.router.observe.workers import Workers

MAX_DECISIONS = 1000
MAX_DIGITS = 18

router = APIRouter()


@dataclass(frozen=True, slots=True, kw_only=True)
class AdminContext:
    workers: Workers
    feed: StateFeed


def build_admin(context: AdminContext) -> FastAPI:
    app = FastAPI(
        title="Octavo router", version=version("octavo-server"), openapi_url=None, docs_url=None, redoc_url=None
    )
    app.state.context = context
    app.include_router(router)
    app.add_exception_handler(OctavoError, _refuse)
    return app


def _context(request: Request) -> AdminContext:
    context: AdminContext = request.app.state.context
    return context


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    reports = await _context(request).workers.collect_reports(ReportQuery("metrics"))
    return Response(exposition(reports), headers={"content-type": CONTENT_TYPE})


@router.get("/debug/decisions")
async def debug_decisions(request: Request, n: str = "20") -> Response:
    workers, number = _context(request).workers, _number(n)
    return json_reply(
        Decisions(latest_decisions(await workers.collect_reports(ReportQuery("decisions", number)), number))
    )


@router.get("/debug/decisions/ended")
async def ended_decisions(request: Request) -> Response:
    workers, after = _context(request).workers, _after(request.query_params.getlist("after"))
    reports = await workers.collect_reports(ReportQuery("ended", after=after))
    return json_reply(Decisions([info for report in reports for info in report.decisions]))


@router.get("/debug/index")
async def debug_index(request: Request) -> Response:
    reports = await _context(request).workers.collect_reports(ReportQuery("index"))
    return json_reply(IndexDebug(merged_index(reports), [*merged_state(reports).replicas]))


@router.get("/state/events")
async def state_events(request: Request) -> Response:
    return StateStream(_context(request).feed.frames())


def _number(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text[:9]) <= MAX_DECISIONS:
        raise InvalidRequest(f"n is {text[:20]!r}; it may be from 1 to {MAX_DECISIONS}.", param="n")
    return int(text)


def _after(given: list[str]) -> dict[str, int]:
    numbers = {}
    for text in given:
        worker, _, number = text.partition(":")
        if not number.isdecimal() or len(number) > MAX_DIGITS:
            message = f"after is {text[:40]!r}; expected WORKER:NUMBER, copied from a worker's latest decision."
            raise InvalidRequest(message, param="after")
        numbers[worker] = int(number)
    return numbers


async def _refuse(_: Request, error: Exception) -> Response:
    return error_reply(error)
