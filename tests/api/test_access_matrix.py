"""docs/reference/access.md is generated from responses of real servers to each route: --update-golden writes it."""

import asyncio
from collections.abc import Iterable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import get_args

import httpx
import pytest
from octavo_server.http.access import PREFIXES, ROUTES, Kind, kind_of
from octavo_testing.routing import routing
from octavo_testing.scripted import write_byte_model
from octavo_testing.server import MODEL, ScriptedClient, serving

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "access.md"
BEGIN, END = (
    "<!-- The tables are made by tests/api/test_access_matrix.py --update-golden -->\n",
    "<!-- end of tables -->",
)
SECRET, ADMIN_SECRET = "between-us", "of-the-operator"
CALLERS = {
    "anonymous": {},
    "client": {"authorization": "Bearer sk-a"},
    "admin": {"authorization": "Bearer boss"},
    "router": {"x-octavo-secret": SECRET},
    "operator": {"x-octavo-secret": ADMIN_SECRET},
}
#: Type of the error for a hidden route, in the forms of OpenAI's and Anthropic's API.
NOT_FOUND = ("Not Found", "not_found_error")
PARAMETERS = {"{model:path}": MODEL, "{response_id}": "resp_1"}


def routes_of(routes: Iterable) -> list[tuple[str, str]]:
    """(path, method) of each route, including those of included routers."""
    found = set()
    for route in routes:
        inner = getattr(route, "routes", None) or getattr(getattr(route, "original_router", None), "routes", None)
        if inner:
            found.update(routes_of(inner))
        else:
            found.update((route.path, method) for method in route.methods - {"HEAD", "OPTIONS"})
    return sorted(
        found, key=lambda route: (route[0], route[1] == "DELETE", route[1])
    )  # the next request resumes the drained server


async def outcome(http, path, method, headers):
    """Return the policy's outcome. Event streams are closed after the head."""
    for name, value in PARAMETERS.items():
        path = path.replace(name, value)
    async with asyncio.timeout(120), http.stream(method, path, headers=headers, json={"model": MODEL}) as answer:
        if answer.status_code == 404:
            await answer.aread()
            is_ours = "x-octavo-rung" not in answer.headers and answer.json()["error"]["type"] in NOT_FOUND
            return "404" if is_ours else "open"
        return str(answer.status_code) if answer.status_code in (401, 403) else "open"


def route_table(of_engine, of_router):
    """Table of the routes of each group."""
    both = [route for route in of_engine if route in of_router]
    only = [[route for route in routes if route not in both] for routes in (of_engine, of_router)]
    lines = ["| group | both servers | only `octavo serve` | only `octavo route` |", "|---|---|---|---|"]
    for kind in get_args(Kind):
        lines.append(f"| {kind} | {' | '.join(names_in_group(routes, kind) for routes in (both, *only))} |")
    return "\n".join([*lines, ""])


def names_in_group(routes, kind):
    methods = {}
    for path, method in routes:
        if kind_of(path) == kind:
            methods.setdefault(path, []).append(method)
    return ", ".join(f"`{' '.join(found)} {path}`" for path, found in methods.items())


async def outcome_rows(server, routes, http):
    """Rows of the table of outcomes: the routes of a group have the same outcome for each caller."""
    outcomes = {}
    for path, method in routes:
        cells = [await outcome(http, path, method, headers) for headers in CALLERS.values()]
        assert outcomes.setdefault(kind_of(path), cells) == cells, f"{method} {path}"
    groups = {}
    for kind in get_args(Kind):
        if kind in outcomes:
            groups.setdefault(tuple(outcomes[kind]), []).append(kind)
    return [f"| {server} | {', '.join(kinds)} | {' | '.join(cells)} |" for cells, kinds in groups.items()]


@pytest.fixture
async def servers(tmp_path):
    """Server name -> (routes, HTTP client)."""
    (tmp_path / "keys").write_text("admin: boss\nalice: sk-a\n")
    guards = {"api_key_file": (tmp_path / "keys",), "router_secret": (SECRET,)}
    async with AsyncExitStack() as stack:
        engines, routers = [], []
        for is_router_only in (False, True):
            engine = ScriptedClient(write_byte_model(tmp_path))
            engines.append(await stack.enter_async_context(serving(engine, **guards, router_only=is_router_only)))
        for settings in ({}, {"admin_port": 0, "admin_secret": (ADMIN_SECRET,)}):
            routed = await stack.enter_async_context(routing(engines[0].url, **guards, **settings))
            await routed.routable(MODEL, 1)
            routers.append(routed)
        url = f"http://127.0.0.1:{routers[1].router.settings.admin_port}"
        admin = await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=240))
        yield engines, routers, admin


async def test_who_may_call_each_route(servers, pytestconfig):
    engines, routers, admin = servers
    of_engine = routes_of(engines[0].server.config.app.routes)
    of_router = routes_of(routers[0].router.app.routes)
    for path, _ in (*of_engine, *of_router):
        assert kind_of(path) is not None, f"{path} is missing in http/access.py"
    paths = {path for path, _ in (*of_engine, *of_router)}
    assert set(ROUTES) <= paths
    assert all(any(path.startswith(prefix) for path in paths) for prefix in PREFIXES)
    outcomes = [
        "| server with keys and a secret | groups | " + " | ".join(CALLERS) + " |",
        "|---" * (len(CALLERS) + 2) + "|",
        *await outcome_rows("`octavo serve`", of_engine, engines[0].http),
        *await outcome_rows("`octavo serve --router-only`", of_engine, engines[1].http),
        *await outcome_rows("`octavo route`", of_router, routers[0].http),
        *await outcome_rows("`octavo route --admin-port --admin-secret`: main port", of_router, routers[1].http),
        *await outcome_rows("`octavo route --admin-port --admin-secret`: admin port", of_router, admin),
        "",
    ]
    tables = [route_table(of_engine, of_router), *outcomes]
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    whole = before + BEGIN + "\n" + "\n".join(tables) + END + after
    if pytestconfig.getoption("--update-golden"):
        PAGE.write_text(whole)
    assert whole == PAGE.read_text(), "if this is meant: pytest tests/api/test_access_matrix.py --update-golden"
