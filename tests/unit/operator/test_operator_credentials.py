"""Both clients, the operator's and kopf's, send a token that was replaced in its file."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import kopf
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from octavo_operator.cluster.client import Cluster
from octavo_operator.cluster.credentials import REREAD_S, account_configuration, kopf_login, make_client, make_session
from octavo_testing.clock import Clock


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def seen() -> AsyncIterator[tuple[str, list[str]]]:
    """The URL of an API server, and the tokens that it received."""
    tokens: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        tokens.append(request.headers.get("Authorization", ""))
        return web.json_response({})

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    async with TestServer(app) as server:
        yield str(server.make_url("")).rstrip("/"), tokens


async def test_the_client_sends_the_current_token(seen: tuple[str, list[str]], tmp_path: Path, clock: Clock) -> None:
    url, tokens = seen
    token = tmp_path / "token"
    token.write_text("first\n")
    async with make_client(account_configuration(url, tmp_path, clock=clock)) as api:
        await Cluster(api).read("Pod", "a", "b")
        token.write_text("second")
        await Cluster(api).read("Pod", "a", "b")
        clock.now_s += REREAD_S
        await Cluster(api).read("Pod", "a", "b")
    assert tokens == ["Bearer first", "Bearer first", "Bearer second"]


async def test_kopf_sends_the_current_token(seen: tuple[str, list[str]], tmp_path: Path, clock: Clock) -> None:
    url, tokens = seen
    token = tmp_path / "token"
    token.write_text("first")
    login = await kopf_login(account_configuration(url, tmp_path, clock=clock))()
    assert isinstance(login, kopf.AiohttpSession)
    assert login.server == url
    async with login.aiohttp_session as session:
        await session.get(f"{url}/api")
        token.write_text("second")
        clock.now_s += REREAD_S
        await session.get(f"{url}/api")
    assert tokens == ["Bearer first", "Bearer second"]


async def test_a_hanging_request_times_out_but_an_open_watch_does_not(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("first")
    events, over = asyncio.Queue[bytes](), asyncio.Event()

    async def watch(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(await events.get())
        return response

    async def hang(_: web.Request) -> web.StreamResponse:
        await over.wait()
        return web.Response()

    app = web.Application()
    app.add_routes([web.get("/watch", watch), web.get("/hang", hang)])
    async with TestServer(app) as server:
        url = str(server.make_url("")).rstrip("/")
        async with make_session(account_configuration(url, tmp_path), answer_s=0.05) as session:
            watching = await session.get(f"{url}/watch")
            with pytest.raises(TimeoutError):
                await session.get(f"{url}/hang")
            events.put_nowait(b"an event, later than that")
            assert await watching.read() == b"an event, later than that"
        over.set()
