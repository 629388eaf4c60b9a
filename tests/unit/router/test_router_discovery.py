"""Discovery of replicas by a static list and by DNS."""

import argparse
import asyncio
import socket

import pytest
from octavo_engine.wire.errors import StartupError
from octavo_server.cli.declared_flags import add_flags
from octavo_server.cli.route_flags import DiscoveryFlags, discovery_of
from octavo_server.router.fleet.discovery.dns import DnsDiscovery
from octavo_server.router.fleet.discovery.kubernetes import KubernetesDiscovery
from octavo_server.router.fleet.endpoint import Endpoint, StaticDiscovery


class Resolver:
    """Answers each look-up with the next of `answers`: addresses, or an exception to raise."""

    def __init__(self, *answers):
        self.answers = [*answers]
        self.asked = []

    async def __call__(self, host, port):
        self.asked.append((host, port))
        if not self.answers:
            await asyncio.Event().wait()
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


async def reported_by(resolver, service="engine:8000", count=1):
    watch = DnsDiscovery(service, interval_s=0, resolve=resolver).watch()
    async with asyncio.timeout(120):
        return [await anext(watch) for _ in range(count)]


def at(*places):
    return frozenset(Endpoint(f"http://{place}", place) for place in places)


NOTHING = socket.gaierror(socket.EAI_NONAME, "Name or service not known")
AWAY = socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")


async def test_every_address_is_a_replica_and_changes_are_reported():
    resolver = Resolver(["10.0.0.1", "fd00::1", "10.0.0.1"], ["fd00::1", "10.0.0.1"], ["10.0.0.2"])
    assert await reported_by(resolver, count=2) == [at("10.0.0.1:8000", "[fd00::1]:8000"), at("10.0.0.2:8000")]
    assert resolver.asked == [("engine", 8000)] * 3


async def test_a_failing_resolver_removes_no_replica():
    resolver = Resolver(["10.0.0.1"], *[AWAY] * 5, OSError("no route"), TimeoutError(), ["10.0.0.1"], ["10.0.0.2"])
    assert await reported_by(resolver, count=2) == [at("10.0.0.1:8000"), at("10.0.0.2:8000")]


async def test_an_empty_answer_counts_only_after_repetition():
    resolver = Resolver(["10.0.0.1"], NOTHING, NOTHING, ["10.0.0.1"], NOTHING, [], NOTHING, ["10.0.0.2"])
    assert await reported_by(resolver, count=3) == [at("10.0.0.1:8000"), at(), at("10.0.0.2:8000")]


async def test_the_systems_resolver_finds_localhost():
    watch = DnsDiscovery("https://localhost:8443", interval_s=60).watch()
    found = await anext(watch)
    assert found & {Endpoint("https://127.0.0.1:8443", "127.0.0.1:8443"), Endpoint("https://[::1]:8443", "[::1]:8443")}


@pytest.mark.parametrize("service", ["engine", "engine:http", "ftp://engine:1", "http://engine:80/v1", "", ":80"])
def test_an_invalid_service_is_refused(service):
    with pytest.raises(StartupError, match="--service"):
        DnsDiscovery(service, interval_s=1)


async def test_a_static_list_is_reported_once():
    watch = StaticDiscovery(["http://a:1", "https://b", "http://[::1]:3/"]).watch()
    assert await anext(watch) == {
        Endpoint("http://a:1", "a:1"),
        Endpoint("https://b", "b:443"),
        Endpoint("http://[::1]:3", "[::1]:3"),
    }
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await anext(watch)


@pytest.mark.parametrize(
    "urls",
    [["a:1"], ["http://a:b"], ["http://a:1/v1"], ["http://a:1?x"], ["http://u:p@a:1"], [""], ["http://a:1"] * 2],
)
def test_an_invalid_replica_list_is_refused(urls):
    with pytest.raises(StartupError, match="--replica"):
        StaticDiscovery(urls)


def parsed(*flags):
    parser = argparse.ArgumentParser()
    add_flags(parser, DiscoveryFlags)
    return parser.parse_args(flags)


def test_flags_select_the_discovery():
    assert isinstance(discovery_of(parsed("--replica", "http://a:1")), StaticDiscovery)
    assert isinstance(discovery_of(parsed("--service", "engine:8000")), DnsDiscovery)
    at_proxy = parsed("--kubernetes", "ns/engine", "--kubernetes-api", "http://127.0.0.1:8001/")
    assert isinstance(discovery_of(at_proxy), KubernetesDiscovery)


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ([], "--replica URL"),
        (["--replica", "http://a:1", "--service", "b:1"], "--replica and --service"),
        (["--kubernetes", "engine"], "--kubernetes-api"),
    ],
)
def test_missing_or_conflicting_discovery_flags_are_refused(flags, reason, monkeypatch):
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(StartupError, match=reason):
        discovery_of(parsed(*flags))
