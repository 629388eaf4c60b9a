"""The operator's client against servers that fail: whatever happens is one kind of error, that says what was asked."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from kubernetes.aio.client import ApiClient
from kubernetes.aio.client.configuration import Configuration
from octavo_operator.cluster.client import ApiError, Cluster
from octavo_operator.secret import operator_key

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def cluster_of(answer: Answer) -> AsyncIterator[Cluster]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    async with TestServer(app) as server, ApiClient(Configuration(host=str(server.make_url("")))) as api:
        yield Cluster(api)


async def _hang_up(request: web.Request) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


async def _break_off(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Length": "100"})
    await response.prepare(request)
    await response.write(b'{"kind":')
    assert request.transport is not None
    request.transport.close()
    return response


async def _speak_html(_: web.Request) -> web.StreamResponse:
    return web.Response(status=502, text="<html>Bad Gateway</html>")


async def _refuse(_: web.Request) -> web.StreamResponse:
    return web.json_response({"reason": "Forbidden", "message": "you may not get pods"}, status=403)


@pytest.mark.parametrize(
    ("answer", "status", "says"),
    [
        (_hang_up, 503, "GET /api/v1/namespaces/a/pods/b: "),
        (_break_off, 503, "GET /api/v1/namespaces/a/pods/b: "),
        (_speak_html, 502, "Bad Gateway"),
        (_refuse, 403, "you may not get pods"),
    ],
)
async def test_every_failure_is_an_api_error(answer: Answer, status: int, says: str) -> None:
    async with cluster_of(answer) as cluster:
        with pytest.raises(ApiError, match=says) as failure:
            await cluster.read("Pod", "a", "b")
    assert failure.value.status == status


async def test_a_server_that_is_not_there_is_named() -> None:
    async with ApiClient(Configuration(host="http://127.0.0.1:1")) as api:
        with pytest.raises(ApiError, match=r"GET /api/v1/namespaces/a/pods/b: .*127\.0\.0\.1:1"):
            await Cluster(api).read("Pod", "a", "b")


async def test_uids_come_page_by_page_and_only_of_the_labelled() -> None:
    asked = []

    async def answer(request: web.Request) -> web.StreamResponse:
        asked.append((request.path, dict(request.query)))
        if "continue" in request.query:
            return web.json_response({"metadata": {}, "items": [{"metadata": {"uid": "3"}}]})
        items = [{"metadata": {"uid": uid}} for uid in "12"]
        return web.json_response({"metadata": {"continue": "a+b"}, "items": items})

    async with cluster_of(answer) as cluster:
        assert await cluster.uids("Deployment", None, label="a/b") == {"1", "2", "3"}
    first = {"limit": "500", "labelSelector": "a/b"}
    assert asked == [("/apis/apps/v1/deployments", first), ("/apis/apps/v1/deployments", first | {"continue": "a+b"})]


async def test_a_secret_without_its_key_says_what_to_do() -> None:
    async def answer(_: web.Request) -> web.StreamResponse:
        return web.json_response({"data": {"other": "eA=="}})

    async with cluster_of(answer) as cluster:
        with pytest.raises(ApiError, match="the Secret octavo-system/octavo-key has no entry `key`: put it back"):
            await operator_key(cluster, namespace="octavo-system", name="octavo-key")
