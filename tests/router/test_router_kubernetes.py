"""Discovery by EndpointSlices, with a fake server that speaks the real API's JSON."""

import asyncio
from contextlib import asynccontextmanager

import msgspec
import pytest
from octavo_engine.wire.errors import StartupError
from octavo_server.backoff import Backoff
from octavo_server.router.fleet.discovery.kubernetes import (
    ClusterAccess,
    EndpointSlice,
    KubernetesDiscovery,
    endpoints_of,
)
from octavo_server.router.fleet.endpoint import Endpoint
from octavo_server.router.fleet.fleet import Fleet
from octavo_server.router.fleet.kv_stream_client import FollowSettings
from octavo_server.router.fleet.prefix_index import PrefixIndex
from octavo_testing.fake_kubernetes import FakeKubernetes
from octavo_testing.fake_replica import MODEL, FakeReplica
from octavo_testing.fleets import until


def pod(number, is_ready=True, port=8000):
    return Endpoint(f"http://10.0.0.{number}:{port}", f"pod-{number}", is_ready)


@asynccontextmanager
async def watching(api, service="engine:http", **access):
    """All sets of endpoints that discovery reported so far, the latest last."""
    await api.start()
    reported = []
    where = ClusterAccess(url=api.url, namespace="default", **access)
    discovery = KubernetesDiscovery(service, where, backoff=Backoff(least_s=0.01, most_s=0.02))

    async def listen():
        async for endpoints in discovery.watch():
            reported.append(endpoints)

    task = asyncio.create_task(listen())
    try:
        yield reported
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await api.stop()


async def wait_reported(reported, *pods):
    await until(lambda: reported and reported[-1] == frozenset(pods))


async def test_ready_and_unready_pods_and_their_changes_are_reported():
    api = FakeKubernetes()
    await api.put("a", {"10.0.0.1": True, "10.0.0.2": False, "10.0.0.3": None})
    await api.put("other", {"10.0.9.9": True}, service="another")
    async with watching(api) as reported:
        await wait_reported(reported, pod(1), pod(2, False), pod(3))
        await api.put("a", {"10.0.0.1": True, "10.0.0.2": True})
        await wait_reported(reported, pod(1), pod(2))
        await api.put("b", {"10.0.0.4": True})
        await wait_reported(reported, pod(1), pod(2), pod(4))
        await api.put("other", {"10.0.9.9": False}, service="another")
        await api.delete("a")
        await wait_reported(reported, pod(4))
        await api.put("b", {})
        await wait_reported(reported)
        assert (api.num_lists, api.num_watches) == (1, 1)


async def test_a_service_without_pods_is_reported_as_empty():
    api = FakeKubernetes()
    async with watching(api) as reported:
        await wait_reported(reported)
        await api.put("a", {"10.0.0.1": True})
        await wait_reported(reported, pod(1))


async def test_an_ended_watch_resumes_at_its_version():
    api = FakeKubernetes()
    api.watch_s = 0.05
    async with watching(api) as reported:
        await until(lambda: api.num_watches > 2)
        await api.put("a", {"10.0.0.1": True})
        await wait_reported(reported, pod(1))
        assert api.num_lists == 1
        assert api.queries[1]["allowWatchBookmarks"] == "true"


async def test_a_bookmark_avoids_a_list():
    api = FakeKubernetes()
    async with watching(api) as reported:
        await until(lambda: api.num_watches == 1)
        await api.bookmark()
        newest = str(api._version)
        api.watch_s = 0.05
        await api.stop()
        await api.start()
        await until(lambda: api.queries[-1].get("resourceVersion") == newest)
        await api.put("a", {"10.0.0.1": True})
        await wait_reported(reported, pod(1))
        assert api.num_lists == 1


@pytest.mark.parametrize("notifies", [True, False], ids=["in the watch", "of a new watch"])
async def test_410_gone_lists_again_and_drops_deleted_slices(notifies):
    api = FakeKubernetes()
    await api.put("a", {"10.0.0.1": True})
    await api.put("b", {"10.0.0.2": True})
    async with watching(api) as reported:
        await wait_reported(reported, pod(1), pod(2))
        await until(lambda: api.num_watches == 1)
        if not notifies:
            await api.stop()
        api._slices.pop("a")
        await api.compact(notify=notifies)
        if not notifies:
            await api.start()
        await wait_reported(reported, pod(2))
        assert api.num_lists == 2


async def test_an_unreachable_api_server_removes_no_replica():
    api = FakeKubernetes()
    await api.put("a", {"10.0.0.1": True})
    async with watching(api) as reported:
        await wait_reported(reported, pod(1))
        await api.stop()
        await api.put("a", {"10.0.0.1": True, "10.0.0.2": True})
        await api.start()
        await wait_reported(reported, pod(1), pod(2))
        assert reported == [frozenset([pod(1)]), frozenset([pod(1), pod(2)])]


async def test_the_token_is_read_for_each_connection(tmp_path):
    token = tmp_path / "token"
    token.write_text("old\n")
    api = FakeKubernetes("old")
    await api.put("a", {"10.0.0.1": True})
    async with watching(api, token_file=token) as reported:
        await wait_reported(reported, pod(1))
        api.token = "new"
        await api.stop()
        await api.start()
        await until(lambda: len(api.queries) > 3)
        token.write_text("new\n")
        await api.put("a", {"10.0.0.1": False})
        await wait_reported(reported, pod(1, False))


async def test_a_forbidden_request_is_logged_with_the_remedy_and_retried(caplog):
    api = FakeKubernetes()
    api.refusal = 403, 'endpointslices.discovery.k8s.io is forbidden: User "x" cannot list resource'
    await api.put("a", {"10.0.0.1": True})
    async with watching(api) as reported:
        await until(lambda: "must be allowed to list and watch endpointslices" in caplog.text)
        assert "cannot list resource" in caplog.text
        assert reported == []
        api.refusal = None
        await wait_reported(reported, pod(1))


@pytest.mark.parametrize(("port", "number"), [("", 9000), ("http", 8000), ("8000", 8000), ("metrics", 9000)])
async def test_the_port_is_chosen_by_name_or_number(port, number):
    api = FakeKubernetes()
    await api.put("a", {"10.0.0.1": True})
    async with watching(api, f"default/engine:{port}") as reported:
        await wait_reported(reported, pod(1, port=number))


def sliced(name, addresses, *, kind="IPv4", ready=True):
    endpoints = [{"addresses": [a], "conditions": {"ready": ready}, "targetRef": {"name": "pod"}} for a in addresses]
    body = {"metadata": {"name": name}, "addressType": kind, "endpoints": endpoints, "ports": [{"port": 80}]}
    return msgspec.convert(body, EndpointSlice)


def test_a_pod_in_several_slices_counts_once():
    moved = [sliced("a", ["10.0.0.1"], ready=False), sliced("b", ["10.0.0.1"])]
    assert endpoints_of(moved, port="") == {Endpoint("http://10.0.0.1:80", "pod", True)}
    both = [sliced("b", ["fd00::1"], kind="IPv6"), sliced("a", ["10.0.0.1"])]
    assert endpoints_of(both, port="") == {Endpoint("http://10.0.0.1:80", "pod", True)}
    assert endpoints_of(both[:1], port="") == {Endpoint("http://[fd00::1]:80", "pod", True)}
    assert endpoints_of(both, port="http") == frozenset()


def test_access_is_read_from_the_pod(tmp_path):
    environ = {"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "443"}
    with pytest.raises(StartupError, match="--kubernetes-api"):
        ClusterAccess.in_cluster(environ, tmp_path)
    (tmp_path / "namespace").write_text("models\n")
    with pytest.raises(StartupError, match="--kubernetes-api"):
        ClusterAccess.in_cluster({}, tmp_path)
    access = ClusterAccess.in_cluster(environ, tmp_path)
    assert (access.url, access.namespace, access.token_file) == ("https://[fd00::1]:443", "models", tmp_path / "token")


@pytest.mark.parametrize("service", ["", "a/b/c", "/", "ns/", ":8000"])
def test_an_invalid_service_name_is_refused(service):
    with pytest.raises(StartupError, match=r"\[NAMESPACE/\]SERVICE"):
        KubernetesDiscovery(service, ClusterAccess(url="http://x", namespace="default"))


async def test_a_pod_is_followed_before_it_is_ready_and_then_gets_requests():
    """A readiness gate that waits for routers requires this."""
    api, fake = FakeKubernetes(), FakeReplica()
    fake.step(stored=[1, 2, 3])
    await fake.start()
    await api.start()
    await api.put("a", {"127.0.0.1": False}, port=fake.port)
    discovery = KubernetesDiscovery("engine:http", ClusterAccess(url=api.url, namespace="default"))
    fleet = Fleet(FollowSettings(), discovery, PrefixIndex(max_entries=1000))
    await fleet.start()
    try:
        await until(lambda: fleet.replicas and fleet.replicas[0].is_exact)
        (replica,) = fleet.replicas
        assert (replica.name, fleet.routable(MODEL)) == ("pod-1", [])
        await api.put("a", {"127.0.0.1": True}, port=fake.port)
        await until(lambda: fleet.routable(MODEL) == [replica])
        assert fake.num_connections == 1
    finally:
        await fleet.stop()
        await api.stop()
        await fake.stop()
