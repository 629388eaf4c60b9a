"""`--usage-log` and the requests of each tenant in `/metrics`: what counts, once, however a request ends."""

import asyncio
import json
import logging
from pathlib import Path

import pytest
import pytest_asyncio
from octavo_engine.wire.records import EngineStats, TenantUsage
from octavo_server.config import QueueLimits
from octavo_server.request_metrics import TenantTotals
from octavo_testing.clock import Clock
from octavo_testing.fleets import until
from octavo_testing.scripted import write_byte_model
from octavo_testing.server import MODEL, ScriptedClient, serving

pytestmark = pytest.mark.asyncio(loop_scope="module")

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]
ANSWER = len("Hello, world!") + 1
KEYS = "alice: sk-a\nbob: sk-b\n"
ALICE = {"Authorization": "Bearer sk-a"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    async with logging_server(folder) as started:
        yield started


def logging_server(folder):
    (folder / "keys").write_text(KEYS)
    secrets = {"api_key_file": (folder / "keys",), "router_secret": ("s",)}
    engine = ScriptedClient(write_byte_model(folder))
    return serving(engine, usage_log=str(folder / "usage.jsonl"), queue=QueueLimits(max_num_queued_reqs=8), **secrets)


def log_of(served):
    return Path(served.engine.config.model) / "usage.jsonl"


@pytest.fixture
def usage(served):
    """An empty log. Other requests of this module are not counted."""
    log_of(served).write_text("")
    telemetry = served.server._context.telemetry
    telemetry.tenants = TenantTotals({})


async def lines(served, count=1):
    """Return the lines of the log, which are written after the responses have been sent."""
    log = log_of(served)
    await until(lambda: log.read_text().count("\n") >= count)
    return [json.loads(line) for line in log.read_text().splitlines()]


async def counted(served):
    """Return the number of requests by tenant and reason."""
    start, metrics = "octavo:tenant_requests_total", await served.metrics()
    return {name.removeprefix(start): value for name, value in metrics.items() if name.startswith(start)}


@pytest.mark.parametrize(
    ("path", "body", "tokens"),
    [
        (TEXT, {"prompt": "abc"}, (3, ANSWER)),
        (TEXT, {"prompt": "abc", "stream": True}, (3, ANSWER)),
        (TEXT, {"prompt": ["a", "abc"], "n": 2, "temperature": 1}, (4, 4 * ANSWER)),
        (TEXT, {"prompt": ["a", "abc"], "n": 2, "temperature": 1, "stream": True}, (4, 4 * ANSWER)),
        (TEXT, {"prompt": "ab", "use_beam_search": True, "n": 2, "max_tokens": 3}, (2, 6)),
        (CHAT, {"messages": HI, "stop": ["world"]}, (None, ANSWER - 2)),
        ("/invocations", {"messages": HI, "stream": True}, (None, ANSWER)),
        ("/v1/chat/completions/batch", {"messages": [HI, HI]}, (None, 2 * ANSWER)),
        ("/v1/responses", {"input": "hi"}, (None, ANSWER)),
        ("/v1/messages", {"messages": HI, "max_tokens": 99, "stream": True}, (None, ANSWER)),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
async def test_a_request_has_one_line(served, usage, path, body, tokens):
    served.engine.num_cached_tokens = 2
    headers = {**ALICE, "x-request-id": "mine"}
    answer = await served.http.post(path, json={"model": MODEL, **body}, headers=headers)
    assert answer.status_code == 200, answer.text
    (line,) = await lines(served)
    num_prompts = len(body["prompt"]) if isinstance(body.get("prompt"), list) else 2 if "batch" in path else 1
    finish = "length" if "use_beam_search" in body else "stop"
    shown = [line[name] for name in ("request_id", "tenant", "model", "path", "cached_tokens", "finish")]
    assert shown == ["mine", "alice", MODEL, path, 2 * num_prompts, finish]
    num_prompt = sum(len(request.prompt_token_ids) for request in served.engine.requests[:num_prompts])
    assert (line["prompt_tokens"], line["completion_tokens"]) == (tokens[0] or num_prompt, tokens[1])
    assert 0 < line["ttft_s"] <= line["duration_s"]
    assert line["time"][10] == "T"
    assert line["time"].endswith("+00:00")
    assert await counted(served) == {f'{{tenant="alice",reason="{finish}"}}': 1}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("hold_at", [0, 3], ids=["in the queue", "in mid-stream"])
async def test_a_request_that_its_client_leaves_has_a_line(served, usage, hold_at, stream):
    served.engine.hold_at = hold_at
    body = {"prompt": "abc", "stream": stream}
    sending = asyncio.create_task(served.http.post(TEXT, json=body, headers=ALICE))
    await served.engine.held.wait()
    sending.cancel()
    (line,) = await lines(served)
    assert (line["finish"], line["prompt_tokens"], line["completion_tokens"]) == ("cut", 3, hold_at)
    assert (line["ttft_s"] is None) == (hold_at == 0)
    assert await counted(served) == {'{tenant="alice",reason="cut"}': 1}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_that_fails_has_a_line(served, usage, stream):
    served.engine.fail_at = 2
    await served.http.post(TEXT, json={"prompt": "abc", "stream": stream}, headers=ALICE)
    assert [(line["finish"], line["completion_tokens"]) for line in await lines(served)] == [("error", 2)]


async def test_requests_that_a_stopping_server_ends_have_lines(tmp_path):
    async with logging_server(tmp_path) as served:
        served.engine.hold_at = 2
        bodies = [{"prompt": "abc", "stream": stream} for stream in (False, True)]
        sending = [asyncio.create_task(served.http.post(TEXT, json=body, headers=ALICE)) for body in bodies]
        await until(lambda: len(served.engine.running) == 2)
        served.server._lifecycle.end_now()
        assert [(await answer).status_code for answer in sending] == [503, 200]
    assert [line["finish"] for line in await lines(served, 2)] == ["error", "error"]


async def test_refused_requests_have_no_line(served, usage):
    for path, body in (
        (TEXT, {"prompt": "x" * 600}),
        (TEXT, {"prompt": []}),
        (TEXT, {"prompt": "a", "model": "other"}),
        (TEXT, {"prompt": "a", "n": 9, "temperature": 1}),
        ("/v1/completions/render", {"prompt": "a"}),
        ("/tokenize", {"prompt": "a"}),
    ):
        await served.http.post(path, json=body, headers=ALICE)
    assert (await served.http.post(TEXT, json={"prompt": "a"})).status_code == 401
    await served.http.post(TEXT, json={"prompt": "a"}, headers=ALICE)
    assert [line["finish"] for line in await lines(served)] == ["stop"]
    assert await counted(served) == {'{tenant="alice",reason="stop"}': 1}


async def test_a_line_cannot_be_forged(served, usage):
    """The tenant comes from a gateway that has the secret; a client chooses the id and the model."""
    name = 'a"}\t{"tenant": "b\xa0\xe9'
    headers = {"x-octavo-secret": "s", "x-octavo-tenant": name.encode("latin-1"), "x-request-id": '"}{"x": "y'}
    await served.http.post(TEXT, json={"prompt": "a", "request_id": "the-bodys"}, headers=headers)
    await served.http.post(TEXT, json={"prompt": "a"}, headers={"x-octavo-secret": "s"})
    first, second = await lines(served, 2)
    assert first["tenant"] == name.strip()
    assert len(first["request_id"]) == 32
    assert second["tenant"] == "(keyless)"


async def test_a_name_that_is_too_long_is_refused(served, usage):
    headers = {"x-octavo-secret": "s", "x-octavo-tenant": "t" * 257}
    answer = await served.http.post(TEXT, json={"prompt": "a"}, headers=headers)
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "BadRequestError")


async def test_streams_have_the_same_bytes_with_the_log(served, usage, tmp_path, monkeypatch):
    monkeypatch.setattr("octavo_server.api.context.time", Time())
    body = {"prompt": "abc", "stream": True, "request_id": "r", "stream_options": {"include_usage": True}}
    async with serving(ScriptedClient(write_byte_model(tmp_path))) as plain:
        expected = (await plain.http.post(TEXT, json=body)).content
    assert (await served.http.post(TEXT, json=body, headers=ALICE)).content == expected
    assert len(await lines(served)) == 1


class Time:
    time = monotonic = Clock(1e9)


async def test_a_full_disk_ends_the_log_with_one_message(tmp_path, caplog):
    engine = ScriptedClient(write_byte_model(tmp_path))
    with caplog.at_level(logging.ERROR):
        async with serving(engine, usage_log="/dev/full") as served:
            for _ in range(3):
                assert (await served.http.post(TEXT, json={"prompt": "a"})).status_code == 200
    (record,) = [record for record in caplog.records if record.name == "octavo_server.access_log"]
    assert "/dev/full" in record.getMessage()


async def test_the_tokens_of_tenants_are_those_that_the_engine_counts(served, usage):
    tenants = {
        "alice": TenantUsage(running=1, prompt_tokens=9, cached_tokens=4, generation_tokens=2),
        "": TenantUsage(generation_tokens=1),
    }
    for generation_tokens in (3, 6):
        served.engine.stats = EngineStats(generation_tokens=generation_tokens, tenants=tenants)
        served.engine.on_stats(served.engine.stats)
    metrics = await served.metrics()
    name = "octavo:tenant_tokens_total"
    assert [metrics[f'{name}{{tenant="alice",kind="{kind}"}}'] for kind in ("prompt", "cached", "generated")] == [
        18,
        8,
        4,
    ]
    assert metrics[f'{name}{{tenant="(keyless)",kind="generated"}}'] == 2
    assert (
        sum(value for key, value in metrics.items() if 'kind="generated"' in key)
        == metrics["vllm:generation_tokens_total"]
    )
