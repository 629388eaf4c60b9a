"""The secret that a router sends to its replicas is replaced while both run."""

import logging
import os

import pytest
from octavo_engine.wire.errors import StartupError
from octavo_server.http.api_keys import CHECK_EVERY_S
from octavo_server.http.router_secret import OutgoingSecret
from octavo_testing.clock import Clock
from octavo_testing.fleets import until
from octavo_testing.routing import routing
from octavo_testing.scripted import write_byte_model
from octavo_testing.server import MODEL, ScriptedClient, serving


@pytest.fixture
def clock():
    return Clock()


def write(file, text, version=1):
    file.write_text(text)
    os.utime(file, ns=(version, version))


def test_the_first_secret_is_sent_and_a_changed_file_is_reloaded(tmp_path, clock):
    file = tmp_path / "secret"
    write(file, "old\nother")
    secret = OutgoingSecret((), file, clock=clock)
    write(file, "new\nold", version=2)
    assert secret.current == "old"
    clock.now_s = CHECK_EVERY_S
    assert secret.current == "new"


def test_a_secret_of_a_flag_has_precedence_over_a_file(tmp_path, clock):
    file = tmp_path / "secret"
    write(file, "of the file")
    secret = OutgoingSecret(("of the flag", "more"), file, clock=clock)
    write(file, "changed", version=2)
    clock.now_s = CHECK_EVERY_S
    assert secret.current == "of the flag"
    assert OutgoingSecret((), None, clock=clock).current == ""


def test_a_broken_change_leaves_the_secret_and_is_logged_once(tmp_path, clock, caplog):
    file = tmp_path / "secret"
    with pytest.raises(StartupError, match="No such file or directory"):
        OutgoingSecret((), file, clock=clock)
    write(file, "s3cret")
    secret = OutgoingSecret((), file, clock=clock)
    write(file, "", version=2)
    with caplog.at_level(logging.ERROR):
        for clock.now_s in (CHECK_EVERY_S, 2 * CHECK_EVERY_S):
            assert secret.current == "s3cret"
    (record,) = caplog.records
    assert "stays unchanged" in record.message
    assert "s3cret" not in record.message


async def test_the_secret_is_replaced_without_a_restart(tmp_path, monkeypatch):
    monkeypatch.setattr("octavo_server.http.api_keys.CHECK_EVERY_S", 0.0)
    theirs, ours = tmp_path / "replicas", tmp_path / "routers"
    write(theirs, "old")
    write(ours, "old")
    engine = ScriptedClient(write_byte_model(tmp_path))
    guards = {"api_key": ("k",), "router_secret_file": theirs}
    async with serving(engine, **guards) as served, routing(served.url, router_secret_file=ours) as routed:
        await routed.routable(MODEL, 1)

        async def complete():
            return (await routed.http.post("/v1/completions", json={"model": MODEL, "prompt": "a"})).status_code

        assert await complete() == 200
        write(theirs, "new", version=2)
        assert await complete() == 401
        write(ours, "new", version=2)
        assert await complete() == 200
        (replica,) = routed.router.fleet.replicas
        for connection in served.server.server_state.connections:
            connection.transport.abort()
        await until(lambda: replica.state != "exact")
        await until(lambda: replica.state == "exact")


@pytest.mark.parametrize("settings", [{"replica_key": "k"}, {"api_key": ("mine",), "replica_key": "k"}])
async def test_a_replica_that_would_merge_tenants_is_refused_with_the_remedy(tmp_path, caplog, settings):
    """The replica would see only the router's key, so all clients would share one tenant's cache."""
    engine, keys = ScriptedClient(write_byte_model(tmp_path)), tmp_path / "keys"
    keys.write_text("admin: k\n")  # otherwise the router may not read its stream
    async with (
        serving(engine, api_key_file=(keys,), cache_isolation=True) as served,
        routing(served.url, **settings) as routed,
    ):
        await until(lambda: routed.router.fleet.replicas[0].refusal)
        await until(lambda: routed.router.fleet.replicas[0].is_described)
        assert routed.router.fleet.routable(MODEL) == []
        assert "--router-secret" in routed.router.fleet.unready_reason
    (line,) = [message for message in caplog.messages if "gets no requests" in message]
    assert "--router-secret" in line


@pytest.mark.parametrize(
    ("guards", "settings"),
    [
        ({"api_key": ("k",), "router_secret": ("s",)}, {"router_secret": ("s",), "api_key": ("mine",)}),
        ({}, {}),
    ],
    ids=["secret", "no keys at all"],
)
async def test_a_replica_that_isolates_tenants_is_admitted_with_the_secret(tmp_path, guards, settings):
    engine = ScriptedClient(write_byte_model(tmp_path))
    async with serving(engine, cache_isolation=True, **guards) as served, routing(served.url, **settings) as routed:
        await routed.routable(MODEL, 1)
        assert not routed.router.fleet.replicas[0].refusal
