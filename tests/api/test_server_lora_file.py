"""`octavo serve --lora-modules-file`: the command, and a router in front of it that reports its adapters."""

import json

import httpx
import pytest
from octavo_server.cli.main import main
from octavo_server.kv.frames import AdapterFile
from octavo_server.router.observe.state import replica_state
from octavo_testing.core_process import scripted_environment
from octavo_testing.fake_replica import FakeReplica
from octavo_testing.fleets import until
from octavo_testing.routing import routing
from octavo_testing.scripted import write_byte_model
from octavo_testing.scripted_serve import SCRIPTED_SERVE
from octavo_testing.serve_command import octavo_serve
from octavo_testing.waiting import eventually


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "adapters.yaml"
    path.write_text("- {name: a, uri: /adapters/a}\n- {name: bad}\n")
    return path


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    with scripted_environment():
        yield str(write_byte_model(folder))


def test_the_command_follows_the_file(tmp_path, model, file):
    flags = ("--load-format", "dummy", "--max-model-len", "256", "--enable-lora", "--lora-modules-file", str(file))

    def adapters():
        listed = httpx.get(f"{serving.url}/v1/models").json()["data"]
        return {entry["id"]: entry["root"] for entry in listed if entry["parent"]}

    def complete():
        return httpx.post(f"{serving.url}/v1/completions", json={"model": "b", "prompt": "hi", "max_tokens": 2})

    with octavo_serve(tmp_path, model, *flags, module=SCRIPTED_SERVE) as serving:
        eventually(lambda: adapters() == {"a": "/adapters/a"})
        assert complete().status_code == 404
        file.write_text(json.dumps([{"name": "a", "uri": "/adapters/a2"}, {"name": "b", "uri": "/adapters/b"}]))
        eventually(lambda: adapters() == {"a": "/adapters/a2", "b": "/adapters/b"})
        assert complete().json()["model"] == "b"
        file.write_text("[]")
        eventually(lambda: adapters() == {})
        assert complete().status_code == 404


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((), "--lora-modules-file needs --enable-lora"),
        (("--enable-lora",), "cannot be read: No such file or directory"),
    ],
    ids=["no adapters", "no file"],
)
def test_a_start_that_could_follow_no_file_is_refused(model, tmp_path, capsys, flags, message):
    assert main(["serve", model, "--lora-modules-file", str(tmp_path / "absent"), *flags]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.asyncio
async def test_a_router_reports_adapters_and_the_state_of_the_file():
    replica = FakeReplica()
    replica.publisher.set_adapters({"a": "hash"})
    replica.publisher.set_adapter_file(AdapterFile("1", {"b": ""}))
    await replica.start()
    async with routing(replica.url) as routed:

        def shown():
            (followed,) = routed.router.fleet.replicas
            state = replica_state(followed, 0.0)
            return state.adapters, state.adapter_file

        await until(lambda: shown() == (("a",), AdapterFile("1", {"b": ""})))
        replica.publisher.set_adapter_file(AdapterFile("2", {"b": "rank 64"}))
        replica.publisher.set_adapters({"a": "hash", "c": "other"})
        await until(lambda: shown() == (("a", "c"), AdapterFile("2", {"b": "rank 64"})))
    await replica.stop()
