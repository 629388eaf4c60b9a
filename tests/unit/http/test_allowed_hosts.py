"""The names under which a server without API keys may be called."""

import socket

import pytest
from octavo_server.http.access import AccessPolicy
from octavo_server.http.allowed_hosts import AllowedHosts
from octavo_server.openai.errors import Forbidden

OWN = socket.gethostname()
ALLOWED = (
    "127.0.0.1",
    "10.1.2.3:8000",
    "[::1]",
    "[fe80::1]:8000",
    "localhost",
    "LocalHost:80",
    "a.localhost:8000",
    OWN,
)
FOREIGN = (
    "evil.example",
    "evil.example:8000",
    "127.0.0.1.evil.example",
    "localhost.evil.example",
    "[::1",
    "::1",
    "",
    ":80",
)


@pytest.mark.parametrize("host", [None, *ALLOWED])
def test_addresses_and_names_of_this_machine_are_allowed(host):
    assert AllowedHosts(()).allows(None if host is None else host.encode())


@pytest.mark.parametrize("host", [*FOREIGN, "127.0.0.1:8000:80", "[127.0.0.1]", "localhost:x", "\x80"])
def test_other_names_are_not(host):
    assert not AllowedHosts(("llm.example",)).allows(host.encode("latin-1"))


def test_given_names_are_allowed_on_any_port():
    hosts = AllowedHosts(("LLM.example",))
    assert hosts.allows(b"llm.example")
    assert hosts.allows(b"llm.EXAMPLE:8443")
    assert not hosts.allows(b"x.llm.example")
    assert AllowedHosts(("*",)).allows(b"evil.example")


@pytest.mark.parametrize("path", ["/v1/completions", "/load", "/drain", "/unlisted"])
def test_an_open_server_refuses_a_foreign_host(path):
    policy = AccessPolicy(hosts=AllowedHosts(()))
    with pytest.raises(Forbidden, match=r"Host 'evil\.example' is unknown.*--allowed-hosts"):
        policy.identify("POST", path, [(b"host", b"evil.example")], 8000)
    policy.identify("POST", path, [(b"host", b"localhost")], 8000)


@pytest.mark.parametrize(("path", "port"), [("/health", 8000), ("/metrics", 8000), ("/v1/completions", None)])
def test_probes_and_unix_sockets_take_any_host(path, port):
    AccessPolicy(hosts=AllowedHosts(())).identify("GET", path, [(b"host", b"evil.example")], port)
