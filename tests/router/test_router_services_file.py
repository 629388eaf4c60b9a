"""`--services-file`: a router that knows its services answers for models without a replica."""

import asyncio
import json

import pytest
from aiohttp import web
from octavo_engine.wire.errors import StartupError
from octavo_server.router.fleet.listed_services import ListedServices
from octavo_testing.fake_replica import MODEL, FakeReplica
from octavo_testing.fleets import until
from octavo_testing.routing import routing

CHAT = "/v1/chat/completions"
WRONG_FIELDS = ('"wakeSeconds": -1', '"holdSeconds": "5"', '"sleeps": 1')


def body(model):
    return {"model": model, "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "services.json"
    write(path, sleeping=["asleep"])
    return path


def write(path, **services):
    listed = [{"name": name, "models": models, "later": "ignored"} for name, models in services.items()]
    new = path.with_suffix(".new")
    new.write_text(json.dumps({"services": listed}))
    new.replace(path)


async def ids(http):
    return [model["id"] for model in (await http.get("/v1/models")).json()["data"]]


async def test_a_listed_model_waits_for_its_replica_beside_others_and_other_names_are_refused(file):
    async def fine(_):
        return web.json_response({})

    replica, awakened = FakeReplica(), FakeReplica(models=("asleep",))
    awakened.answers[CHAT] = fine
    await replica.start()
    await awakened.start()
    await awakened.kill()
    async with routing(replica.url, awakened.url, services_file=file) as routed:
        asking = asyncio.create_task(routed.http.post(CHAT, json=body("asleep")))
        await until(lambda: routed.router.queue.num_by_model() == {"asleep": 1})
        refused = await routed.http.post(CHAT, json=body("unknown"))
        assert refused.status_code == 404
        assert "unknown" in refused.json()["error"]["message"]
        await awakened.start()
        assert (await asking).status_code == 200
        assert await ids(routed.http) == ["asleep", MODEL]
    await replica.stop()
    await awakened.stop()


async def test_a_listed_adapter_waits_for_a_replica_that_loads_it(file):
    async def fine(_):
        return web.json_response({})

    replica = FakeReplica()
    replica.answers[CHAT] = fine
    await replica.start()
    file.write_text(json.dumps({"services": [{"name": "s", "models": [MODEL], "adapters": ["x"]}]}))
    async with routing(replica.url, services_file=file) as routed:
        await routed.routable(MODEL, 1)
        asking = asyncio.create_task(routed.http.post(CHAT, json=body("x")))
        await until(lambda: routed.router.queue.num_by_model() == {"x": 1})
        assert (await routed.http.post(CHAT, json=body("y"))).status_code == 404
        assert CHAT not in replica.paths, "the base model answers for no adapter"
        replica.publisher.set_adapters({"x": "hash"})
        assert (await asking).status_code == 200
        assert await ids(routed.http) == [MODEL, "x"]
    await replica.stop()


async def test_without_replicas_only_listed_models_are_held(file):
    async with routing(services_file=file, forward={"max_hold_time": 0.2}) as routed:
        assert (await routed.http.post(CHAT, json=body("unknown"))).status_code == 404
        held = await routed.http.post(CHAT, json=body("asleep"))
        assert held.status_code == 503
        assert held.headers["retry-after"]
        assert await ids(routed.http) == ["asleep"]


def test_a_changed_file_is_read_again_and_a_broken_one_is_not(file):
    now = [0.0]
    listed = ListedServices(file, clock=lambda: now[0])

    def names():
        now[0] += 1.5
        return [service.name for service in listed.services]

    assert names() == ["sleeping"]
    write(file, sleeping=["asleep"], another=["b", "c"])
    assert names() == ["sleeping", "another"]
    file.write_text('{"services": [{"name": 1}]}')
    assert names() == ["sleeping", "another"]
    file.unlink()
    assert names() == ["sleeping", "another"]
    write(file)
    assert names() == []


@pytest.mark.parametrize(
    "text",
    [
        *(None, "", "{}", "[]", '{"services": [{"name": "a"}]}', '{"services": {"a": []}}'),
        *(f'{{"services": [{{"name": "a", "models": [], {wrong}}}]}}' for wrong in WRONG_FIELDS),
    ],
)
def test_an_unusable_file_is_refused_at_the_start(text, tmp_path):
    path = tmp_path / "services.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(StartupError, match=f"--services-file {path}: "):
        ListedServices(path)
