"""The queue over HTTP, with a real engine core: rejection before any work, the time limit, and the order of tenants."""

import asyncio

import pytest
from octavo_engine.settings.config import EngineConfig
from octavo_server.config import QueueLimits
from octavo_testing.core_process import collect, running, scripted_environment
from octavo_testing.scripted import scripted, write_byte_model
from octavo_testing.server import ScriptedClient, serving

pytestmark = pytest.mark.slow

TEXT = "/v1/completions"


def queue(**limits):
    return QueueLimits(**limits)


async def held_request(served, **fields):
    served.engine.hold_at = 1
    sending = asyncio.create_task(served.http.post(TEXT, json={"prompt": "a", **fields}))
    await served.engine.held.wait()
    return sending


@pytest.mark.parametrize("path", [TEXT, "/v1/chat/completions"])
async def test_full_queue_gives_a_429_with_retry_after(tmp_path, path):
    engine = ScriptedClient(write_byte_model(tmp_path))
    async with serving(engine, queue=queue(max_num_queued_reqs=1)) as served:
        running = await held_request(served)
        for body in (b'{"prompt": "b"}', b"not even read"):
            answer = await served.http.post(path, content=body, headers={"content-type": "application/json"})
            error = answer.json()["error"]
            assert (answer.status_code, error["type"], error["code"]) == (429, "RateLimitError", 429)
            assert int(answer.headers["retry-after"]) >= 1
            assert "--max-num-queued-reqs" in error["message"]
        assert (await served.metrics())["vllm:admission_rejections_total"] == 2
        rendered = await served.http.post("/v1/completions/render", json={"prompt": "a"})
        assert rendered.status_code == 200
        engine.resumed.set()
        assert (await running).status_code == 200
        assert (await served.http.post(TEXT, json={"prompt": "a"})).status_code == 200
        assert served.server._context.admission.num_seqs == 0


async def test_each_sequence_of_a_request_counts_in_the_queue(tmp_path):
    engine = ScriptedClient(write_byte_model(tmp_path))
    async with serving(engine, queue=queue(max_num_queued_reqs=6)) as served:
        running = await held_request(served, prompt=["a", "b", "c"], n=2, temperature=1)
        while len(engine.running) < 3:
            await asyncio.sleep(0)
        assert (await served.http.post(TEXT, json={"prompt": "a"})).status_code == 429
        running.cancel()
        for _ in range(3):
            await engine.aborted.get()
        engine.resumed.set()
        assert (await served.http.post(TEXT, json={"prompt": "a"})).status_code == 200


@pytest.fixture
async def one_place(tmp_path):
    """An engine core that runs one sequence at a time."""
    with scripted_environment() as folder:
        config = EngineConfig(model=str(write_byte_model(folder)), load_format="dummy", max_num_seqs=1)
        async with running(config) as llm:
            yield llm


def occupied(llm, gate):
    """A request that occupies the engine: the gate holds it at its second token, and then it runs a while longer."""
    return asyncio.create_task(collect(llm, "x", scripted("a" * 50, extra_args=gate.wait_at(1)), "occupies"))


@pytest.mark.parametrize("stream", [False, True])
async def test_request_that_waits_too_long_gets_a_503(one_place, gate, monkeypatch, stream):
    async with serving(one_place, queue=queue(max_queue_time=0.05)) as served:
        publish_added = one_place.on_add

        def open_gate_at_deadline(request):
            publish_added(request)
            if request.start_by_s is not None:  # the request is `late`, not the occupier
                asyncio.get_running_loop().call_at(request.start_by_s, gate.open)

        monkeypatch.setattr(one_place, "on_add", open_gate_at_deadline)
        occupier = occupied(one_place, gate)
        late = asyncio.create_task(served.http.post(TEXT, json={"prompt": "a", "max_tokens": 1, "stream": stream}))
        answer = await late
        assert (answer.status_code, answer.json()["error"]["type"]) == (503, "ServiceUnavailableError")
        assert "0.05 s (--max-queue-time)" in answer.json()["error"]["message"]
        assert int(answer.headers["retry-after"]) >= 1
        assert (await occupier)[-1].finished


async def test_light_tenant_does_not_wait_for_all_requests_of_a_heavy_one(one_place, gate, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("heavy: sk-h\nlight: sk-l\n")
    order = []

    async def ask(served, key, num_unfinished):
        body = {"prompt": "a", "max_tokens": 3}
        asking = asyncio.create_task(served.http.post(TEXT, headers={"Authorization": f"Bearer {key}"}, json=body))
        asking.add_done_callback(lambda _: order.append(key))
        while one_place.num_unfinished < num_unfinished:
            await asyncio.sleep(0.001)
        return asking

    async with serving(one_place, api_key_file=(keys,)) as served:
        occupier = occupied(one_place, gate)
        asked = [await ask(served, key, i + 2) for i, key in enumerate(["sk-h"] * 6 + ["sk-l"])]
        gate.open()
        assert {answer.status_code for answer in await asyncio.gather(*asked)} == {200}
        await occupier
    assert "sk-l" in order[:2]
