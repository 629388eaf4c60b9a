"""Replicas without a KV stream, such as plain vLLM: the router polls their models, health and load."""

import logging

import pytest
from octavo_server.backoff import Backoff
from octavo_server.kv.frames import ReplicaLoad
from octavo_server.router.fleet.kv_stream_client import FollowSettings
from octavo_server.router.fleet.model_names import Known
from octavo_server.router.fleet.polling_client import load_of
from octavo_testing.fake_replica import MODEL, FakeReplica, vllm_replica
from octavo_testing.fleets import QUICK, fleet_at, running_fleet, until
from octavo_testing.routing import routing


async def test_model_names_and_load_are_polled():
    fake = vllm_replica("llama", "adapter", running=3, waiting=2)
    async with running_fleet(fake) as fleet:
        await until(lambda: fleet.routable("adapter"))
        (replica,) = fleet.routable("llama")
        assert (replica.state, replica.admitted_epoch) == ("blind", None)
        assert replica.load == ReplicaLoad(running=3, waiting=2)
        fake.bodies["/v1/models"] = b'{"data": [{"id": "llama"}]}'
        await until(lambda: fleet.models() == ["llama"] and not fleet.routable("adapter"))
        fake.set_vllm_load(5, 0)
        await until(lambda: replica.load == ReplicaLoad(running=5))


async def test_names_with_a_parent_are_adapters():
    fakes = vllm_replica("llama"), vllm_replica("llama")
    fakes[0].bodies["/v1/models"] = b'{"data": [{"id": "llama", "parent": null}, {"id": "lora", "parent": "llama"}]}'
    async with running_fleet(*fakes) as fleet:
        await until(lambda: len(fleet.routable("llama")) == 2 and len(fleet.routable("lora")) == 1)
        assert fleet.resolve(None) == Known("llama"), "an adapter on one replica makes no request ambiguous"
        assert fleet.base_model("lora") == "llama"
        fakes[0].bodies["/v1/models"] = b'{"data": [{"id": "llama"}]}'
        await until(lambda: not fleet.routable("lora"))


async def test_max_model_len_is_read_if_the_server_reports_it():
    """vLLM reports `max_model_len`; for other servers it is unknown, not 0."""
    fake = vllm_replica("llama", "adapter", "odd")
    fake.bodies["/v1/models"] = (
        b'{"data": [{"id": "llama", "max_model_len": 32768}, {"id": "adapter"}, {"id": "odd", "max_model_len": "8k"}]}'
    )
    async with running_fleet(fake) as fleet:
        await until(lambda: fleet.routable("llama"))
        async with routing(fake.url) as routed:
            await routed.routable("odd", 1)
            listed = (await routed.http.get("/v1/models")).json()["data"]
            one = (await routed.http.get("/v1/models/llama")).json()
    assert {card["id"]: card["max_model_len"] for card in listed} == {"llama": 32768, "adapter": None, "odd": None}
    assert one["max_model_len"] == 32768


async def test_metrics_are_not_read_without_reads_metrics():
    fake = vllm_replica("llama", running=3)
    settings = FollowSettings(poll_every_s=0.01, reads_metrics=False)
    async with running_fleet(fake, settings=settings) as fleet:
        await until(lambda: fake.paths.count("/health") > 3)
        assert fleet.replicas[0].load == ReplicaLoad()
        assert "/metrics" not in fake.paths


async def test_a_server_without_metrics_gets_requests():
    fake = vllm_replica("llama")
    fake.status["/metrics"] = 404
    async with running_fleet(fake) as fleet:
        await until(lambda: fleet.routable("llama"))


async def test_polled_and_streaming_replicas_serve_together():
    async with running_fleet(vllm_replica(MODEL), FakeReplica()) as fleet:
        await until(lambda: len(fleet.routable(MODEL)) == 2)
        assert sorted(replica.state for replica in fleet.replicas) == ["blind", "exact"]


@pytest.mark.parametrize("ends", ["kill", "hang", "sick"])
async def test_a_polled_replica_gets_no_requests_until_it_answers(ends):
    fake = vllm_replica("llama")
    async with running_fleet(fake) as fleet:
        await until(lambda: fleet.routable("llama"))
        if ends == "kill":
            await fake.kill()
        elif ends == "hang":
            fake.hang()
        else:
            fake.status["/health"] = 503
        await until(lambda: not fleet.routable("llama"))
        assert fleet.models() == ["llama"]
        if ends == "kill":
            await fake.start()
        fake.wake()
        fake.status.pop("/health", None)
        await until(lambda: fleet.routable("llama"))


async def test_a_stream_is_followed_when_its_replica_replaces_a_polled_one():
    fake = vllm_replica("llama")
    async with running_fleet(fake) as fleet:
        await until(lambda: fleet.routable("llama"))
        await fake.kill()
        fake.status.clear()
        await fake.start()
        await until(lambda: fleet.routable(MODEL))
        assert (fleet.replicas[0].state, fleet.models()) == ("exact", [MODEL])


@pytest.mark.parametrize("body", [b"", b"<html>", b'{"data": [{"name": "llama"}]}', b"[" * 10_000])
async def test_a_server_with_an_invalid_model_list_gets_no_requests(body):
    fake = vllm_replica()
    fake.bodies["/v1/models"] = body
    async with running_fleet(fake) as fleet:
        await until(lambda: fleet.replicas and fleet.replicas[0].why.startswith("/v1/models"))
        assert (fleet.replicas[0].state, fleet.models()) == ("connecting", [])


async def test_an_html_page_is_no_stream_and_redirects_are_not_followed():
    elsewhere, fake = FakeReplica(), vllm_replica("llama")
    fake.status["/kv/events"] = 200
    async with running_fleet(fake, elsewhere) as fleet:
        await until(lambda: fleet.routable("llama"))
        fake.status["/v1/models"] = 302
        await until(lambda: not fleet.routable("llama"))
        assert "302" in next(replica.why for replica in fleet.replicas if replica.url == fake.url)


async def test_a_missing_key_is_logged_once_with_the_flag(caplog):
    fake = FakeReplica()
    fake.status["/kv/events"] = 401
    async with running_fleet(fake) as fleet:
        await until(lambda: fleet.replicas and "--replica-key" in fleet.replicas[0].why)
        await until(lambda: fake.paths.count("/kv/events") > 3)
    (line,) = [message for message in caplog.messages if "is connecting" in message]
    assert "/kv/events answered 401: it requires --replica-key or --router-secret" in line


async def test_a_starting_replica_is_logged_once_without_a_warning(caplog, monkeypatch):
    """The one line helps to find a mistyped address."""
    caplog.set_level(logging.INFO)
    ended, tries = Backoff.next_wait_s, []
    monkeypatch.setattr(Backoff, "next_wait_s", lambda backoff, **times: tries.append(1) or ended(backoff, **times))
    fake = FakeReplica()
    await fake.start()
    await fake.kill()
    async with fleet_at(fake.url, settings=QUICK) as fleet:
        await until(lambda: fleet.replicas and fleet.replicas[0].why == "no connection: Connection refused")
        await until(lambda: len(tries) > 2)
        assert fleet.replicas[0].state == "connecting"
    first, last = [record for record in caplog.records if record.name.endswith(("kv_stream_client", "replica_status"))]
    name = fake.url.removeprefix("http://")
    assert first.message == f"replica {name} does not answer yet: no connection: Connection refused"
    assert "is gone" in last.message
    assert first.levelno == logging.INFO
    await fake.stop()


async def test_an_unresolvable_name_is_logged(caplog):
    caplog.set_level(logging.INFO)
    async with fleet_at("http://nobody.invalid:1", settings=QUICK) as fleet:
        await until(lambda: fleet.replicas and fleet.replicas[0].why.startswith("no connection: "))
    assert "replica nobody.invalid:1 does not answer yet: no connection: Name or service not known" in caplog.text


async def test_a_replica_without_an_answer_is_logged_with_the_timeout():
    fake = FakeReplica()
    fake.hang()
    async with running_fleet(fake) as fleet:
        await until(lambda: fleet.replicas and fleet.replicas[0].why == "no answer within 0.5 s")
        fake.wake()
        await until(lambda: fleet.replicas[0].state == "exact")


def test_invalid_metric_lines_are_skipped():
    lines = ["vllm:num_requests_running 2", "vllm:num_requests_running{a=\"b\"} 1e3 17", "vllm:num_requests_running{",
             "vllm:num_requests_waiting{} NaN", "vllm:num_requests_waiting", "", "{} 3"]  # fmt: skip
    assert load_of("\n".join(lines)) == ReplicaLoad(running=1002)
