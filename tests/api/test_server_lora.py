"""A request's `model` chooses an adapter, and responses show its name; the list of models has root and parent."""

import pytest
import pytest_asyncio
from octavo_engine.settings.lora import lora_modules
from octavo_engine.wire.records import EngineStats
from octavo_testing.scripted import scripted_hash, write_byte_model
from octavo_testing.server import MODEL, ScriptedClient, serving

pytestmark = pytest.mark.asyncio(loop_scope="module")
MODULES = [
    {"name": "red", "path": "/adapters/red"},
    {"name": "team/blue", "path": "/adapters/blue", "base_model_name": "smol"},
]
CHAT = [{"role": "user", "content": "hi"}]
BODIES = {
    "/v1/completions": {"prompt": "hi"},
    "/v1/chat/completions": {"messages": CHAT},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": CHAT, "max_tokens": 3},
}


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def shared(tmp_path_factory):
    folder = write_byte_model(tmp_path_factory.mktemp("model"))
    client = ScriptedClient(folder, enable_lora=True, lora_modules=lora_modules(MODULES))
    async with serving(client) as started:
        yield started


@pytest.fixture
def served(shared):
    shared.engine.reset()
    return shared


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("name", ["red", "team/blue", MODEL])
async def test_the_model_of_a_request_chooses_the_adapter(served, path, name):
    answer = await served.http.post(path, json={"model": name, **BODIES[path]})
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == name
    (request,) = served.engine.requests
    paths = {module["name"]: module["path"] for module in MODULES}
    assert request.adapter == (scripted_hash(paths[name]) if name in paths else "")


async def test_chunks_of_a_stream_show_the_adapter(served):
    body = {"model": "red", "prompt": "hi", "stream": True}
    async with served.http.stream("POST", "/v1/completions", json=body) as answer:
        lines = [line async for line in answer.aiter_lines() if '"model"' in line]
    assert lines
    assert all('"model":"red"' in line for line in lines)


async def test_a_request_without_a_model_uses_the_base_model(served):
    answer = await served.http.post("/v1/completions", json={"prompt": "hi"})
    assert answer.json()["model"] == MODEL
    assert served.engine.requests[0].adapter == ""


async def test_beams_use_the_adapter(served):
    body = {"model": "red", "prompt": "hi", "use_beam_search": True, "n": 2, "max_tokens": 2}
    assert (await served.http.post("/v1/completions", json=body)).json()["model"] == "red"
    assert {request.adapter for request in served.engine.requests} == {scripted_hash("red")}


async def test_an_unknown_name_is_not_found(served):
    answer = await served.http.post("/v1/completions", json={"model": "green", "prompt": "hi"})
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == 404
    assert (await served.http.get("/v1/models/green")).status_code == 404


async def test_tokens_are_counted_for_an_adapter(served):
    answer = await served.http.post("/tokenize", json={"model": "red", "prompt": "hi"})
    assert answer.json()["count"] == 2


async def test_metrics_name_the_adapters_in_use(served):
    def labels(metrics):
        return next(name for name in metrics if name.startswith("vllm:lora_requests_info"))

    served.engine.on_stats(EngineStats(running_adapters=[scripted_hash("red")], waiting_adapters=["unloaded"]))
    metrics = await served.metrics()
    name = 'vllm:lora_requests_info{max_lora="8",running_lora_adapters="red",waiting_lora_adapters=""}'
    assert labels(metrics) == name
    served.engine.on_stats(EngineStats(waiting_adapters=[scripted_hash("blue"), scripted_hash("red")]))
    later = await served.metrics()
    assert '{max_lora="8",running_lora_adapters="",waiting_lora_adapters="red,team/blue"}' in labels(later)
    assert later[labels(later)] > metrics[name] > 1e9


async def test_the_list_of_models_has_root_and_parent(served):
    entries = {entry["id"]: entry for entry in (await served.http.get("/v1/models")).json()["data"]}
    assert list(entries) == [MODEL, "red", "team/blue"]
    found = {name: (entry["root"], entry["parent"]) for name, entry in entries.items() if name != MODEL}
    assert found == {"red": ("/adapters/red", MODEL), "team/blue": ("/adapters/blue", "smol")}
    assert entries[MODEL]["parent"] is None
    assert (await served.http.get("/v1/models/team/blue")).json() == entries["team/blue"]
