"""The operator's client against servers that fail: whatever happens is one kind of error, that says what was asked."""

import base64
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from kubernetes.aio.client import ApiClient
from kubernetes.aio.client.configuration import Configuration
from octavo_operator.cluster.client import ApiError, Cluster
from octavo_operator.secret import operator_key, restore_key

MINE = b"mine, \xff is no text"
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
        assert await cluster.list_uids("Deployment", None, label="a/b") == {"1", "2", "3"}
    first = {"limit": "500", "labelSelector": "a/b"}
    assert asked == [("/apis/apps/v1/deployments", first), ("/apis/apps/v1/deployments", first | {"continue": "a+b"})]


@pytest.mark.parametrize(("there", "written", "said"), [
    (None, [{"key": MINE}], "is gone: it is made again"),
    (MINE, [], ""),
    (b"other", [], "was changed: put the key in use back"),
])  # fmt: skip
async def test_a_key_that_was_deleted_comes_back_as_it_was(there, written, said, caplog) -> None:  # type: ignore[no-untyped-def]
    posted = []

    async def answer(request: web.Request) -> web.StreamResponse:
        if request.method == "POST":
            data = (await request.json())["data"]
            posted.append({name: base64.b64decode(value) for name, value in data.items()})
        elif there is None:
            return web.json_response({"reason": "NotFound"}, status=404)
        return web.json_response({"data": {"key": base64.b64encode(there or b"").decode()}})

    async with cluster_of(answer) as cluster:
        await restore_key(cluster, MINE, namespace="octavo-system", name="octavo-key")
    assert posted == written
    assert said in caplog.text
    assert bool(caplog.text) == bool(said)


@pytest.mark.parametrize("statuses", [(403,), (404, 403)])
async def test_what_keeps_a_key_from_coming_back_is_said_and_no_more(statuses, caplog) -> None:  # type: ignore[no-untyped-def]
    left = list(statuses)

    async def answer(_: web.Request) -> web.StreamResponse:
        return web.json_response({"message": "you may not"}, status=left.pop(0))

    async with cluster_of(answer) as cluster:
        await restore_key(cluster, b"mine", namespace="octavo-system", name="octavo-key")
    assert (left, "you may not" in caplog.text) == ([], True)


async def test_a_secret_without_its_key_says_what_to_do() -> None:
    async def answer(_: web.Request) -> web.StreamResponse:
        return web.json_response({"data": {"other": "eA=="}})

    async with cluster_of(answer) as cluster:
        with pytest.raises(ApiError, match="the Secret octavo-system/octavo-key has no entry `key`: put it back"):
            await operator_key(cluster, namespace="octavo-system", name="octavo-key")
