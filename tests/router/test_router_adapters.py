"""A router over engines with different adapters: requests reach a holder, and repeated prompts the one that caches."""

import time
from contextlib import AsyncExitStack

import pytest
import pytest_asyncio
from octavo_engine.settings.config import EngineConfig
from octavo_engine.settings.lora import lora_modules
from octavo_testing.core_process import running, scripted_environment
from octavo_testing.fleets import until
from octavo_testing.routing import routing
from octavo_testing.scripted import write_byte_model
from octavo_testing.server import MODEL, serving

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]
TEXT, LOAD, UNLOAD = "/v1/completions", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
ROUTABLE_WITHIN_S = 1.0


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def fleet():
    """Four replicas; replica i holds the adapters 2i and 2i + 1."""
    with scripted_environment() as folder:
        model = write_byte_model(folder)
        async with AsyncExitStack() as stack:
            served = []
            for index in range(4):
                names = [f"a{number}=/adapters/{number}" for number in (2 * index, 2 * index + 1)]
                config = EngineConfig(
                    model=str(model), load_format="dummy", max_model_len=512, num_gpu_blocks_override=256,
                    enable_lora=True, lora_modules=lora_modules(names),
                )  # fmt: skip
                engine = await stack.enter_async_context(running(config))
                served.append(await stack.enter_async_context(serving(engine, allows_adapter_updates=True)))
            routed = await stack.enter_async_context(routing(*(each.url for each in served)))
            await routed.routable(MODEL, 4)
            yield routed, served


async def post(routed, **body):
    answer = await routed.http.post(TEXT, json={"max_tokens": 4, **body})
    assert answer.status_code == 200, answer.text
    return answer


def replica_of(answer):
    return answer.headers["x-octavo-replica"]


async def test_requests_reach_a_holder_and_repeated_prompts_the_one_that_caches(fleet):
    routed, served = fleet
    prompt = "A prompt of several blocks, which only one of the replicas has cached for this adapter. " * 2
    for number in range(8):
        first = await post(routed, model=f"a{number}", prompt=prompt)
        assert first.json()["model"] == f"a{number}"
        assert replica_of(first) in served[number // 2].url
        again = await post(routed, model=f"a{number}", prompt=prompt)
        assert (replica_of(again), again.headers["x-octavo-rung"]) == (replica_of(first), "exact")
        assert again.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 100


async def test_requests_without_a_model_and_for_the_base_model_reach_every_replica(fleet):
    routed, _ = fleet
    answer = await post(routed, prompt="hi")
    assert answer.json()["model"] == MODEL
    found = {replica_of(await post(routed, model=MODEL, prompt=f"prompt {i}")) for i in range(40)}
    assert len(found) == 4


async def test_requests_for_adapters_count_as_uses_of_the_base_model(fleet):
    routed, _ = fleet
    counts = routed.router.telemetry.num_requests
    before = counts[MODEL]
    await post(routed, model="a3", prompt="hi")
    assert counts[MODEL] == before + 1
    assert "a3" not in counts


async def test_unknown_names_are_not_found(fleet):
    routed, _ = fleet
    assert (await routed.http.post(TEXT, json={"model": "a9", "prompt": "hi"})).status_code == 404


async def test_the_list_of_models_has_all_adapters(fleet):
    routed, _ = fleet
    entries = {entry["id"]: entry for entry in (await routed.http.get("/v1/models")).json()["data"]}
    assert entries.keys() == {MODEL, *(f"a{number}" for number in range(8))}
    assert (entries["a0"]["parent"], entries["a0"]["max_model_len"]) == (MODEL, 512)
    assert entries[MODEL]["parent"] is None


async def test_a_loaded_adapter_is_routable_within_a_second_and_an_unloaded_one_is_not(fleet):
    routed, served = fleet
    began_s = time.monotonic()
    answer = await served[3].http.post(LOAD, json={"lora_name": "new", "lora_path": "/adapters/new"})
    assert answer.status_code == 200, answer.text
    await until(lambda: len(routed.router.fleet.routable("new")) == 1)
    assert time.monotonic() - began_s < ROUTABLE_WITHIN_S
    assert replica_of(await post(routed, model="new", prompt="hi")) in served[3].url
    await served[3].http.post(UNLOAD, json={"lora_name": "new"})
    await until(lambda: not routed.router.fleet.routable("new"))
    assert (await routed.http.post(TEXT, json={"model": "new", "prompt": "hi"})).status_code == 404


async def test_a_name_of_two_holders_is_routed_to_both(fleet):
    routed, served = fleet
    for each in served[:2]:
        await each.http.post(LOAD, json={"lora_name": "both", "lora_path": "/adapters/both"})
    await routed.routable("both", 2)
    found = {replica_of(await post(routed, model="both", prompt=f"prompt {i}")) for i in range(20)}
    assert len(found) == 2
    for each in served[:2]:
        await each.http.post(UNLOAD, json={"lora_name": "both"})
    await routed.routable("both", 0)
