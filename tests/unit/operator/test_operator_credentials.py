"""A token that is replaced in its file is taken up, by our own client and by kopf's."""

from collections.abc import AsyncIterator
from pathlib import Path

import kopf
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from octavo_operator.cluster.client import Cluster
from octavo_operator.cluster.credentials import REREAD_S, account_configuration, client_of, kopf_login
from octavo_testing.clock import Clock


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def seen() -> AsyncIterator[tuple[str, list[str]]]:
    """An API server's address, and the tokens that it was shown."""
    tokens: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        tokens.append(request.headers.get("Authorization", ""))
        return web.json_response({})

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    async with TestServer(app) as server:
        yield str(server.make_url("")).rstrip("/"), tokens


async def test_our_client_shows_the_token_of_now(seen: tuple[str, list[str]], tmp_path: Path, clock: Clock) -> None:
    url, tokens = seen
    token = tmp_path / "token"
    token.write_text("first\n")
    async with client_of(account_configuration(url, tmp_path, clock=clock)) as api:
        await Cluster(api).read("Pod", "a", "b")
        token.write_text("second")
        await Cluster(api).read("Pod", "a", "b")
        clock.now_s += REREAD_S
        await Cluster(api).read("Pod", "a", "b")
    assert tokens == ["Bearer first", "Bearer first", "Bearer second"]


async def test_kopf_shows_the_token_of_now(seen: tuple[str, list[str]], tmp_path: Path, clock: Clock) -> None:
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
