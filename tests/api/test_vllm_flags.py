"""Flags of vLLM that change what a server does: streams, logs, templates, TLS, Unix sockets, CORS, downloads."""

import json
import socket
import ssl
import subprocess
from contextlib import contextmanager

import httpx
import pytest
from octavo_server.http.cors import CorsPolicy
from octavo_server.kv.card import read_card
from octavo_server.router.prompts.prompt_hasher import PromptHasher
from octavo_testing.core_process import scripted_environment
from octavo_testing.scripted import write_byte_model
from octavo_testing.scripted_serve import SCRIPTED_SERVE
from octavo_testing.serve_command import free_port, octavo_serve
from octavo_testing.server import ScriptedClient, serving
from octavo_testing.waiting import eventually

pytestmark = pytest.mark.slow

PAGE = {"Origin": "https://page.example"}
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}
TEMPLATE = "{{ mood or 'plain' }}{% if tools %} with tools{% endif %}: {{ messages[0].content }}"
TINY = ("--load-format", "dummy", "--max-model-len", "64")


@pytest.fixture
def client(tmp_path):
    return ScriptedClient(write_byte_model(tmp_path), chat_template=TEMPLATE)


async def deltas(served, path, body):
    answer = await served.http.post(path, json={**body, "stream": True})
    found = (line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: "))
    return [json.loads(event) for event in found if event != "[DONE]"]


@pytest.mark.parametrize(("interval", "sizes"), [(1, [1] * 10), (4, [1, 4, 4, 1]), (100, [1, 9])])
async def test_a_chunk_has_as_many_tokens_as_the_interval_except_the_first(client, interval, sizes):
    client.replies = ["012345678"]
    async with serving(client, stream_interval=interval) as served:
        chunks = await deltas(served, "/v1/completions", {"prompt": "a", "return_token_ids": True})
    assert [len(chunk["choices"][0]["token_ids"]) for chunk in chunks] == sizes
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "012345678"


async def test_responses_keep_the_interval(client):
    client.replies = ["012345678"]
    async with serving(client, stream_interval=4) as served:
        found = await deltas(served, "/v1/responses", {"input": "a"})
    texts = [event["delta"] for event in found if event["type"] == "response.output_text.delta"]
    assert texts == ["0", "1234", "5678"]


async def test_default_template_values_yield_to_the_request(client):
    async with serving(client, default_chat_template_kwargs={"mood": "calm"}) as served:
        for extra in ({}, {"chat_template_kwargs": {"mood": "loud"}}, {"chat_template_kwargs": {"other": 1}}):
            body = {"messages": [{"role": "user", "content": "hi"}], **extra}
            assert (await served.http.post("/v1/chat/completions", json=body)).status_code == 200
            assert (await served.http.post("/tokenize", json=body)).status_code == 200
    prompts = [client.frontend.tokenizer.decode(r.prompt_token_ids, skip_special_tokens=False) for r in client.requests]
    assert prompts == ["calm: hi", "loud: hi", "calm: hi"]


async def test_reasoning_is_off_by_default_values(client):
    client.replies = ["<think>x</think>y"]
    settings = {"reasoning_parser": "qwen3", "default_chat_template_kwargs": {"enable_thinking": False}}
    async with serving(client, **settings) as served:
        body = {"messages": [{"role": "user", "content": "hi"}]}
        (choice,) = (await served.http.post("/v1/chat/completions", json=body)).json()["choices"]
    assert choice["message"]["content"] == "<think>x</think>y"


@pytest.mark.parametrize(("excludes", "prompt"), [(False, "plain with tools: hi"), (True, "plain: hi")])
async def test_unused_tools_are_described_unless_excluded(client, excludes, prompt):
    async with serving(client, exclude_tools_when_tool_choice_none=excludes) as served:
        body = {"messages": [{"role": "user", "content": "hi"}], "tools": [TOOL], "tool_choice": "none"}
        assert (await served.http.post("/v1/chat/completions", json=body)).status_code == 200
    (request,) = client.requests
    assert client.frontend.tokenizer.decode(request.prompt_token_ids, skip_special_tokens=False) == prompt


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize", "/v1/chat/completions/render"])
async def test_a_request_brings_a_template_only_if_the_server_trusts_it(client, path):
    body = {
        "messages": [{"role": "user", "content": "hi"}],
        "chat_template": "{{ eos_token }}{{ messages[0].content }}!",
    }
    async with serving(client) as served:
        answer = await served.http.post(path, json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "chat_template")
        assert "--trust-request-chat-template" in answer.json()["error"]["message"]
    async with serving(client, trust_request_chat_template=True) as served:
        answer = (await served.http.post(path, json=body)).json()
        broken = await served.http.post(path, json={**body, "chat_template": "{% if %}"})
    ids = answer.get("tokens") or answer.get("token_ids") or client.requests[0].prompt_token_ids
    assert client.frontend.tokenizer.decode(ids, skip_special_tokens=False) == "<|endoftext|>hi!"
    assert (broken.status_code, broken.json()["error"]["param"]) == (400, "chat_template")


async def test_a_router_does_not_hash_a_prompt_of_another_template(client):
    body = {"messages": [{"role": "user", "content": "a long enough message" * 9}]}
    async with serving(client) as served:
        hasher = PromptHasher.from_card(read_card(served.server._context.model_card))
    assert hasher.hash_prompt("chat", body, "").is_exact
    estimated = hasher.hash_prompt("chat", {**body, "chat_template": "{{ messages[0].content }}"}, "")
    assert (estimated.is_exact, estimated.hashes) == (False, ())


async def test_a_router_hashes_with_the_replicas_defaults(client):
    text = "a long enough message for some blocks" * 4
    bodies = [
        {"messages": [{"role": "user", "content": text}]},
        {"messages": [{"role": "user", "content": text}], "tools": [TOOL], "tool_choice": "none"},
    ]
    settings = {"default_chat_template_kwargs": {"mood": "calm"}, "exclude_tools_when_tool_choice_none": True}
    async with serving(client, **settings) as served:
        for body in bodies:
            await served.http.post("/v1/chat/completions", json=body)
        card = read_card(served.server._context.model_card)
    hasher = PromptHasher.from_card(card)
    for body, request in zip(bodies, client.requests, strict=True):
        sent = hasher.hash_prompt("completion", {"prompt": list(request.prompt_token_ids)}, "").hashes
        assert sent
        assert hasher.hash_prompt("chat", body, "").hashes == sent


@pytest.mark.parametrize(("extra", "token"), [({}, "token_id:72"), ({"return_tokens_as_token_ids": False}, "H")])
async def test_tokens_are_ids_by_default_or_as_the_request_says(client, extra, token):
    async with serving(client, return_tokens_as_token_ids=True) as served:
        body = {"prompt": "a", "logprobs": 1, "max_tokens": 1, **extra}
        (choice,) = (await served.http.post("/v1/completions", json=body)).json()["choices"]
    assert choice["logprobs"]["tokens"] == [token]


async def test_outputs_are_logged_once_and_cut(client, caplog):
    caplog.set_level("INFO", "octavo_server")
    settings = {"enable_log_requests": True, "enable_log_outputs": True, "max_log_len": 5}
    async with serving(client, **settings) as served:
        for stream in (False, True):
            await served.http.post("/v1/completions", json={"prompt": "a", "n": 2, "stream": stream})
    lines = [record.message for record in caplog.records if record.name.endswith("access_log")]
    assert len(lines) == 4
    assert all(line.endswith("output 'Hello', finish reason stop") for line in lines)


async def test_pages_may_send_the_allowed_methods_with_cookies(client):
    settings = {"cors": CorsPolicy(allowed_origins=("*",), allowed_methods=("POST",), allow_credentials=True)}
    async with serving(client, **settings) as served:
        asked = {**PAGE, "Access-Control-Request-Method": "POST"}
        allowed = await served.http.options("/v1/completions", headers=asked)
        refused = await served.http.options(
            "/v1/completions", headers={**PAGE, "Access-Control-Request-Method": "DELETE"}
        )
    assert (allowed.status_code, refused.status_code) == (200, 400)
    assert allowed.headers["access-control-allow-credentials"] == "true"
    assert allowed.headers["access-control-allow-origin"] == PAGE["Origin"]


@contextmanager
def running(*command):
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        try:
            yield process
        finally:
            process.kill()


def listens(path):
    with socket.socket(socket.AF_UNIX) as client:
        return client.connect_ex(str(path)) == 0


def is_healthy(http):
    try:
        return http.get("/health").status_code == 200
    except httpx.TransportError:
        return False


@pytest.fixture
def tiny(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    with scripted_environment():
        yield str(write_byte_model(folder))


def test_start_names_flags_and_variables_without_effect_once(tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_USE_V1", "1")
    flags = (
        "--trust_remote_code",
        "--cudagraph-metrics",
        "--no-enable-request-id-headers",
        "--num-scheduler-steps",
        "4",
    )
    quiet = ("--disable-access-log-for-endpoints", "/v1/models")
    with octavo_serve(tmp_path, tiny, *TINY, *flags, *quiet, module=SCRIPTED_SERVE) as serving_process:
        httpx.get(f"{serving_process.url}/v1/models")
    text = serving_process.log.read_text()
    (unused,) = [line for line in text.splitlines() if "accepted without effect here" in line]
    for flag in ("--trust-remote-code (no code", "--cudagraph-metrics", "--no-enable-request-id-headers"):
        assert flag in unused
    assert text.count("--num-scheduler-steps") == text.count("VLLM_USE_V1") == 1
    assert "/v1/models" not in text


def test_level_of_the_log_is_vllms_variable(tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "ERROR")
    with octavo_serve(tmp_path, tiny, *TINY, "--cudagraph-metrics", module=SCRIPTED_SERVE) as serving_process:
        pass
    assert "serving at" not in serving_process.log.read_text()


def test_late_engine_ends_the_start(tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_ENGINE_READY_TIMEOUT_S", "0.001")
    done = subprocess.run([*SCRIPTED_SERVE, "--port", "0", tiny, *TINY], capture_output=True, text=True, timeout=240)
    assert done.returncode == 1
    assert "the engine was not ready within 0.001 s: raise $VLLM_ENGINE_READY_TIMEOUT_S" in done.stderr


def test_unix_socket_serves_and_replaces_an_abandoned_one(tiny, tmp_path):
    path = tmp_path / "octavo.sock"
    for _ in range(2):
        with running(*SCRIPTED_SERVE, "--uds", str(path), tiny, *TINY):
            transport = httpx.HTTPTransport(uds=str(path))
            eventually(lambda: listens(path))
            with httpx.Client(transport=transport, base_url="http://octavo") as http:
                assert http.get("/health").status_code == 200
                answer = http.post("/v1/completions", json={"prompt": "a", "max_tokens": 2, "stream": True})
                assert answer.text.endswith("data: [DONE]\n\n")
        assert path.is_socket()


def test_https_serves_streams(tiny, tmp_path):
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    subject = ("-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1")
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", certificate, *subject],
        check=True,
        capture_output=True,
    )
    port = free_port()
    files = ("--ssl-keyfile", str(key), "--ssl-certfile", str(certificate))
    with running(*SCRIPTED_SERVE, "--port", str(port), *files, tiny, *TINY):
        context = ssl.create_default_context(cafile=str(certificate))
        with httpx.Client(verify=context, base_url=f"https://127.0.0.1:{port}") as http:
            eventually(lambda: is_healthy(http))
            answer = http.post("/v1/completions", json={"prompt": "a" * 30, "max_tokens": 20, "stream": True})
            assert answer.text.endswith("data: [DONE]\n\n")
