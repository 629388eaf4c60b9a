"""The operator's client against failing servers: every failure is an ApiError that names the request."""

import base64
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from kubernetes.aio.client import ApiClient
from kubernetes.aio.client.configuration import Configuration
from octavo_operator.cluster.client import ApiError, Cluster
from octavo_operator.secret import derive_secrets, operator_key, restore_key

MINE = b"mine, \xff is no text"
Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def cluster_of(answer: Answer) -> AsyncIterator[Cluster]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    async with TestServer(app) as server, ApiClient(Configuration(host=str(server.make_url("")))) as api:
        yield Cluster(api)


async def _abort_connection(request: web.Request) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


async def _end_early(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Length": "100"})
    await response.prepare(request)
    await response.write(b'{"kind":')
    assert request.transport is not None
    request.transport.close()
    return response


async def _respond_with_html(_: web.Request) -> web.StreamResponse:
    return web.Response(status=502, text="<html>Bad Gateway</html>")


async def _forbid(_: web.Request) -> web.StreamResponse:
    return web.json_response({"reason": "Forbidden", "message": "you may not get pods"}, status=403)


@pytest.mark.parametrize(
    ("answer", "status", "says"),
    [
        (_abort_connection, 503, "GET /api/v1/namespaces/a/pods/b: "),
        (_end_early, 503, "GET /api/v1/namespaces/a/pods/b: "),
        (_respond_with_html, 502, "Bad Gateway"),
        (_forbid, 403, "you may not get pods"),
    ],
)
async def test_every_failure_is_an_api_error(answer: Answer, status: int, says: str) -> None:
    async with cluster_of(answer) as cluster:
        with pytest.raises(ApiError, match=says) as failure:
            await cluster.read("Pod", "a", "b")
    assert failure.value.status == status


async def test_the_error_for_an_unreachable_server_names_it() -> None:
    async with ApiClient(Configuration(host="http://127.0.0.1:1")) as api:
        with pytest.raises(ApiError, match=r"GET /api/v1/namespaces/a/pods/b: .*127\.0\.0\.1:1"):
            await Cluster(api).read("Pod", "a", "b")


async def test_uids_are_listed_by_page_and_label() -> None:
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


@pytest.mark.parametrize(("stored", "written", "logged"), [
    (None, [{"key": MINE}], "was deleted: it is created again"),
    (MINE, [], ""),
    (b"other", [], "was changed, but the operator uses the old key"),
])  # fmt: skip
async def test_a_deleted_key_is_restored_and_a_changed_one_is_logged(stored, written, logged, caplog) -> None:  # type: ignore[no-untyped-def]
    posted = []

    async def answer(request: web.Request) -> web.StreamResponse:
        if request.method == "POST":
            data = (await request.json())["data"]
            posted.append({name: base64.b64decode(value) for name, value in data.items()})
        elif stored is None:
            return web.json_response({"reason": "NotFound"}, status=404)
        return web.json_response({"data": {"key": base64.b64encode(stored or b"").decode()}})

    async with cluster_of(answer) as cluster:
        await restore_key(cluster, MINE, namespace="octavo-system", name="octavo-key")
    assert posted == written
    assert logged in caplog.text
    assert bool(caplog.text) == bool(logged)


@pytest.mark.parametrize("statuses", [(403,), (404, 403)])
async def test_errors_of_restoring_a_key_are_only_logged(statuses, caplog) -> None:  # type: ignore[no-untyped-def]
    left = list(statuses)

    async def answer(_: web.Request) -> web.StreamResponse:
        return web.json_response({"message": "you may not"}, status=left.pop(0))

    async with cluster_of(answer) as cluster:
        await restore_key(cluster, b"mine", namespace="octavo-system", name="octavo-key")
    assert (left, "you may not" in caplog.text) == ([], True)


async def test_the_error_for_a_secret_without_its_key_has_the_remedy() -> None:
    async def answer(_: web.Request) -> web.StreamResponse:
        return web.json_response({"data": {"other": "eA=="}})

    async with cluster_of(answer) as cluster:
        with pytest.raises(ApiError, match="the Secret octavo-system/octavo-key has no entry `key`: restore the entry"):
            await operator_key(cluster, namespace="octavo-system", name="octavo-key")


def test_each_service_has_three_secrets_of_its_own() -> None:
    """Running engines have the shared one, so another version of the operator must derive the same."""
    made = [derive_secrets(b"key", router) for router in (("default", "llm"), ("default", "other"), ("prod", "llm"))]
    assert made[0].shared == "09f17d9c72d72a5c079472793e40346452237bd292c379b6d7a6bc730abb7c84"
    assert len({secret for secrets in made for secret in secrets}) == 9
    assert all(len(secrets.group) >= 32 for secrets in made)
