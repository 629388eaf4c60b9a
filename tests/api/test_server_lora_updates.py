"""Adapters that are loaded and unloaded while the server runs: vLLM's texts and status codes, and refusals."""

import asyncio

import pytest
import pytest_asyncio
from octavo_engine.settings.lora import lora_modules
from octavo_engine.wire.errors import InvalidRequest, Unavailable
from octavo_testing.scripted import scripted_hash, write_byte_model
from octavo_testing.server import MODEL, ScriptedClient, serving

pytestmark = pytest.mark.asyncio(loop_scope="module")
LIMIT_S = 30
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def shared(tmp_path_factory):
    folder = write_byte_model(tmp_path_factory.mktemp("model"))
    client = ScriptedClient(folder, enable_lora=True, lora_modules=lora_modules("red=/adapters/red"))
    async with serving(client, allows_adapter_updates=True) as started:
        yield started


@pytest.fixture
def served(shared):
    shared.engine.reset()
    return shared


async def names(served):
    return [entry["id"] for entry in (await served.http.get("/v1/models")).json()["data"]]


async def test_a_loaded_adapter_is_served_and_listed(served):
    answer = await served.http.post(LOAD, json={"lora_name": "blue", "lora_path": "/adapters/b"})
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'blue' added successfully.")
    assert await names(served) == [MODEL, "red", "blue"]
    assert (await served.http.get("/v1/models/blue")).json()["root"] == "/adapters/b"
    await served.http.post("/v1/completions", json={"model": "blue", "prompt": "hi"})
    assert served.engine.requests[0].adapter == scripted_hash("b")


async def test_an_unloaded_adapter_is_not_found(served):
    answer = await served.http.post(UNLOAD, json={"lora_name": "red"})
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'red' removed successfully.")
    assert await names(served) == [MODEL]
    assert (await served.http.post("/v1/completions", json={"model": "red", "prompt": "hi"})).status_code == 404
    again = await served.http.post(UNLOAD, json={"lora_name": "red"})
    assert again.status_code == 404
    error = again.json()["error"]
    assert (error["type"], error["message"]) == ("NotFoundError", "The lora adapter 'red' cannot be found.")


async def test_an_adapter_is_replaced_in_place_only_on_request(served):
    body = {"lora_name": "red", "lora_path": "/adapters/other"}
    answer = await served.http.post(LOAD, json=body)
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "InvalidUserInput")
    assert answer.json()["error"]["message"] == (
        "The lora adapter 'red' has already been loaded. If you want to load the adapter in place, set "
        "'load_inplace' to True."
    )
    assert (await served.http.post(LOAD, json={**body, "load_inplace": True})).status_code == 200
    assert served.engine.adapters["red"].hash == scripted_hash("other")


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        (LOAD, {"lora_name": "x"}, "Both 'lora_name' and 'lora_path' must be provided."),
        (LOAD, {"lora_path": "x"}, "Both 'lora_name' and 'lora_path' must be provided."),
        (LOAD, {"lora_name": MODEL, "lora_path": "x"}, "is the name of the served model"),
        (UNLOAD, {}, "'lora_name' needs to be provided to unload a LoRA adapter."),
    ],
)
async def test_incomplete_and_conflicting_bodies_are_refused(served, path, body, message):
    answer = await served.http.post(path, json=body)
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "InvalidUserInput")
    assert message in answer.json()["error"]["message"]
    assert await names(served) == [MODEL, "red"]


@pytest.mark.parametrize(
    ("error", "status"), [(InvalidRequest("rank 64"), 400), (Unavailable("asleep", retry_after_s=5), 503)]
)
async def test_an_adapter_that_cannot_be_loaded_changes_nothing(served, error, status):
    served.engine.adapter_error = error
    answer = await served.http.post(LOAD, json={"lora_name": "blue", "lora_path": "/adapters/b"})
    assert (answer.status_code, answer.json()["error"]["message"]) == (status, str(error))
    assert await names(served) == [MODEL, "red"]


async def begin_load(served, name):
    """Start a load whose source waits for `adapters_readable`."""
    served.engine.adapters_readable.clear()
    loading = asyncio.create_task(served.http.post(LOAD, json={"lora_name": name, "lora_path": "/adapters/b"}))
    async with asyncio.timeout(LIMIT_S):
        while name not in served.engine.loading:
            await asyncio.sleep(0)
    return loading


async def test_a_client_that_leaves_ends_its_load(served):
    loading = await begin_load(served, "blue")
    loading.cancel()
    async with asyncio.timeout(LIMIT_S):
        while served.engine.loading:
            await asyncio.sleep(0.001)
    served.engine.adapters_readable.set()
    assert await names(served) == [MODEL, "red"]


async def test_a_drain_waits_for_a_load_no_longer_than_its_timeout(tmp_path):
    client = ScriptedClient(write_byte_model(tmp_path), enable_lora=True)
    async with serving(client, allows_adapter_updates=True, drain_timeout=0.0) as started:
        loading = await begin_load(started, "blue")
        await started.stop()
        answer = await loading
    assert (answer.status_code, answer.json()["error"]["type"]) == (503, "ServiceUnavailableError")
    assert client.adapters == {}


async def test_the_file_of_adapters_alone_decides(tmp_path):
    client = ScriptedClient(write_byte_model(tmp_path), enable_lora=True)
    file = tmp_path / "adapters.json"
    async with serving(client, allows_adapter_updates=True, lora_modules_file=file) as started:
        for path in (LOAD, UNLOAD):
            answer = await started.http.post(path, json={"lora_name": "x", "lora_path": "y"})
            assert answer.status_code == 400
            assert f"--lora-modules-file {file}" in answer.json()["error"]["message"]


@pytest.mark.parametrize("settings", [{}, {"allows_adapter_updates": True}], ids=str)
async def test_updates_need_the_variable_and_the_flag(tmp_path, settings):
    client = ScriptedClient(write_byte_model(tmp_path), enable_lora=not settings)
    async with serving(client, **settings) as started:
        for path in (LOAD, UNLOAD):
            answer = await started.http.post(path, json={"lora_name": "x", "lora_path": "y"})
            assert answer.status_code == 404
            assert "--enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1" in answer.text
