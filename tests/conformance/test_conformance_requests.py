"""Reading, rejecting and naming requests: rows 1-11."""

import re
import socket

import httpx
import pytest
from octavo_testing.conformance import conforms
from octavo_testing.target import REAL_MODEL
from openai import AuthenticationError, BadRequestError, NotFoundError

pytestmark = pytest.mark.slow

JSON_TYPE = "Content-Type: application/json\r\n"
HELLO = [{"role": "user", "content": "hi"}]
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
CONTEXT = re.compile(
    r"maximum context length is (\d+) tokens.*?requested (\d+) output tokens.*?at least (\d+) input tokens"
)


def ids(text):
    return list(text.encode())


@conforms(1, "Unknown JSON fields are accepted", how="openai, HTTP")
def test_unknown_fields_are_accepted(tiny):
    extra = {"frobnicate": {"deeply": ["nested"]}, "x-trace": 1}
    tiny.openai.chat.completions.create(model="tiny", messages=HELLO, max_tokens=1, extra_body=extra)
    for path, body in ((TEXT, {"prompt": "a"}), ("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [65]})):
        assert tiny.http.post(path, json={**body, **extra}).status_code == 200


@conforms(2, 'Malformed bodies get a 400 of type "Bad Request", never a 422', how="HTTP")
@pytest.mark.parametrize("path", [CHAT, TEXT, "/tokenize", "/detokenize"])
@pytest.mark.parametrize("body", ["", "{", "[]", '{"prompt": {}, "messages": 1, "tokens": "x"}', '{"model": 7}'])
def test_malformed_bodies_are_rejected(tiny, path, body):
    answer = tiny.http.post(path, content=body, headers={"content-type": "application/json"})
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "Bad Request")


@conforms(
    3,
    "Errors are `{error: {message, type, param, code}}` with the status as `code`; unsupported fields get a 400 that "
    "names the field (vLLM: 400, 422 or 501)",
    how="openai, HTTP",
)
def test_errors_have_openai_s_body(tiny):
    requests = [
        (TEXT, {"prompt": "a", "temperature": 9}, 400, "BadRequestError", "temperature"),
        (TEXT, {"prompt": "a", "suffix": "b"}, 400, "BadRequestError", "suffix"),
        (TEXT, {"prompt": "a", "model": "x"}, 404, "NotFoundError", None),
        ("/nowhere", {}, 404, "Not Found", None),
    ]
    for path, body, status, kind, param in requests:
        answer = tiny.http.post(path, json=body)
        error = answer.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert (answer.status_code, error["code"], error["type"], error["param"]) == (status, status, kind, param)
    with pytest.raises(BadRequestError, match="temperature must be in") as caught:
        tiny.openai.chat.completions.create(model="tiny", messages=HELLO, temperature=9)
    assert (caught.value.type, caught.value.param) == ("BadRequestError", "temperature")


@pytest.mark.real_model
@conforms(4, "An unknown model gets a 404 NotFoundError; `model` of an answer is the first served name", how="openai")
def test_model_names_are_checked(real):
    with pytest.raises(NotFoundError, match=re.escape("The model `gpt-9` does not exist.")):
        real.openai.chat.completions.create(model="gpt-9", messages=HELLO)
    assert real.http.post(TEXT, json={"prompt": "a", "max_tokens": 1}).json()["model"] == REAL_MODEL
    assert real.openai.completions.create(model="org/alias", prompt="a", max_tokens=1).model == REAL_MODEL


@conforms(
    5,
    "A prompt beyond the context gets a 400 with vLLM's text and OpenAI's `context_length_exceeded`, which agents read",
    how="openai",
)
@pytest.mark.parametrize("stream", [False, True])
def test_context_length_is_enforced(tiny, stream):
    with pytest.raises(BadRequestError) as caught:
        tiny.openai.completions.create(model="tiny", prompt=ids("x" * 260), max_tokens=30, stream=stream)
    error = caught.value
    assert (error.type, error.code, error.param) == ("BadRequestError", "context_length_exceeded", "input_tokens")
    assert error.body["message"] == (
        "This model's maximum context length is 256 tokens. However, you requested 30 output tokens and your prompt "
        "contains at least 260 input tokens, for a total of at least 290 tokens. Please reduce the length of the input "
        "prompt or the number of requested output tokens. (parameter=input_tokens, value=260) "
        "(code=context_length_exceeded)"
    )
    assert CONTEXT.search(error.message).groups() == ("256", "30", "260")


@conforms(9, "`max_tokens` beyond the context is cut to what fits", how="openai")
def test_an_output_limit_beyond_the_context_is_cut(tiny):
    answer = tiny.openai.completions.create(
        model="tiny", prompt=ids("x" * 250), max_tokens=30, extra_body={"ignore_eos": True}
    )
    assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (6, "length")


@conforms(2, "A body of another content type than application/json gets a 400", how="HTTP")
def test_bodies_must_be_json(tiny):
    form = {"content-type": "application/x-www-form-urlencoded"}
    assert tiny.http.post(TEXT, content=b'{"prompt": "a"}', headers=form).status_code == 400


@conforms(
    6,
    "An empty prompt or `cache_salt`, `include_usage` without `stream`, and `prompt_logprobs` with `stream` get a 400; "
    "values that ask for nothing don't",
    how="HTTP",
)
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"cache_salt": ""}, "cache_salt"),
    ],
)
def test_contradicting_fields_are_rejected(tiny, fields, param):
    nothing = {"stream_options": {"include_usage": False}, "prompt_logprobs": 0, "stream": True, "logit_bias": {}}
    assert tiny.http.post(TEXT, json={"prompt": "a", "max_tokens": 1, **nothing}).status_code == 200
    answer = tiny.http.post(TEXT, json={"prompt": "a", **fields})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


@conforms(
    7,
    "API keys protect all routes except probes, /metrics and API documents (vLLM: only /v1); a wrong key gets a 401 "
    'of the shape of row 3 (vLLM: `{"error": "Unauthorized"}`)',
    how="openai, HTTP",
)
def test_api_keys_are_checked(tiny):
    stranger = tiny.openai.with_options(api_key="sk-wrong")
    with pytest.raises(AuthenticationError) as caught:
        stranger.models.list()
    assert caught.value.body == {
        "message": "Missing or wrong API key: send 'Authorization: Bearer KEY'.",
        "type": "AuthenticationError",
        "param": None,
        "code": 401,
    }
    assert tiny.openai.with_options(api_key="sk-other-0123456789").models.list().data[0].id == "tiny"
    with httpx.Client(base_url=tiny.url) as nobody:
        assert nobody.post(CHAT, json={"messages": HELLO}).status_code == 401
        assert [nobody.get(path).status_code for path in ("/health", "/version", "/metrics")] == [200, 200, 200]
        assert nobody.post("/tokenize", json={"prompt": "a"}).status_code == 401
    with httpx.Client(base_url=tiny.url, headers={"Authorization": "Bearer sk-other-0123456789"}) as tenant:
        assert tenant.get("/debug/requests").status_code == 403


@conforms(
    8,
    "`X-Request-Id` is echoed or generated (vLLM: with a flag); response ids end with it or the body's `request_id`",
    how="openai, HTTP",
)
def test_request_ids_are_echoed(tiny):
    for path, prefix, body in ((CHAT, "chatcmpl", {"messages": HELLO}), (TEXT, "cmpl", {"prompt": "a"})):
        answer = tiny.http.post(path, json={**body, "max_tokens": 1}, headers={"X-Request-Id": "mine-1"})
        assert (answer.headers["x-request-id"], answer.json()["id"]) == ("mine-1", f"{prefix}-mine-1")
        named = tiny.http.post(path, json={**body, "max_tokens": 1, "request_id": "body-2"})
        assert named.json()["id"] == f"{prefix}-body-2"
    answer = tiny.openai.completions.with_raw_response.create(model="tiny", prompt="a", max_tokens=1)
    assert answer.parse().id == f"cmpl-{answer.request_id}"
    assert tiny.http.get("/nowhere").headers["x-request-id"]


@conforms(9, "`max_completion_tokens` overrides `max_tokens`", how="openai")
def test_max_completion_tokens_overrides_max_tokens(tiny):
    answer = tiny.openai.chat.completions.create(
        model="tiny", messages=HELLO, max_tokens=9, max_completion_tokens=3, extra_body={"ignore_eos": True}
    )
    assert answer.usage.completion_tokens == 3


@conforms(9, "Without a limit, chat may fill the context, and completions have 16 tokens", how="openai")
def test_default_length_limits_apply(tiny):
    endless = {"ignore_eos": True}
    chat = tiny.openai.chat.completions.create(model="tiny", messages=HELLO, extra_body=endless)
    assert (chat.usage.total_tokens, chat.choices[0].finish_reason) == (256, "length")
    text = tiny.openai.completions.create(model="tiny", prompt="a", extra_body=endless)
    assert (text.usage.completion_tokens, text.choices[0].finish_reason) == (16, "length")


@conforms(9, "Unset sampling fields come from the model's generation_config.json", how="HTTP")
def test_generation_config_sets_defaults(tiny):
    body = {"prompt": "a", "max_tokens": 1, "n": 2}
    assert "temperature is 0" in tiny.http.post(TEXT, json=body).json()["error"]["message"]
    assert tiny.http.post(TEXT, json={**body, "temperature": 1}).status_code == 200


@conforms(10, "A prompt is a string, token ids, or a list of either; choice = prompt·n + i", how="openai")
def test_every_prompt_form_is_accepted(tiny):
    def create(prompt, **fields):
        return tiny.openai.completions.create(model="tiny", prompt=prompt, max_tokens=2, **fields)

    one, other = (create(text).choices[0].text for text in ("one", "other"))
    assert create(ids("one")).choices[0].text == one
    for prompts in (["one", "other"], [ids("one"), ids("other")]):
        assert [(c.index, c.text) for c in create(prompts).choices] == [(0, one), (1, other)]
    echoed = create(["one", "other"], n=2, temperature=1, echo=True).choices
    starts = ["one", "one", "other", "other"]
    assert [choice.text.startswith(start) for choice, start in zip(echoed, starts, strict=True)] == [True] * 4
    assert [choice.index for choice in echoed] == [0, 1, 2, 3]


@conforms(
    10,
    "`echo` puts the prompt before the answer; `max_tokens: 0` then returns only the prompt",
    how="openai",
)
def test_echo_returns_the_prompt(tiny):
    plain = tiny.openai.completions.create(model="tiny", prompt="abc", max_tokens=3).choices[0].text
    echoed = tiny.openai.completions.create(model="tiny", prompt="abc", max_tokens=3, echo=True).choices[0].text
    assert echoed == "abc" + plain
    alone = tiny.openai.completions.create(model="tiny", prompt="abc", max_tokens=0, echo=True, logprobs=1).choices[0]
    assert (alone.text, alone.logprobs.tokens, alone.logprobs.token_logprobs[0]) == ("abc", ["a", "b", "c"], None)


@conforms(10, "`suffix` is rejected by name, as in vLLM", how="openai")
def test_suffix_is_rejected(tiny):
    with pytest.raises(BadRequestError, match="suffix"):
        tiny.openai.completions.create(model="tiny", prompt="a", suffix="z")


def aborted(metrics):
    return metrics['vllm:request_success_total{finished_reason="abort"}']


@pytest.mark.real_model
@conforms(11, "A client that disconnects from a stream aborts its request and frees its blocks", how="openai")
def test_disconnect_aborts_a_stream(real):
    before = aborted(real.metrics())
    stream = real.openai.completions.create(
        model=REAL_MODEL, prompt="Count:", max_tokens=1500, stream=True, extra_body={"ignore_eos": True}
    )
    assert next(stream).choices
    stream.close()
    after = real.metrics_when(lambda m: aborted(m) == before + 1 and m['octavo:kv_blocks{state="in_use"}'] == 0)
    assert after["vllm:num_requests_running"] == 0


@pytest.mark.real_model
@conforms(11, "A client that disconnects before an unstreamed response aborts its request", how="HTTP")
def test_disconnect_aborts_a_plain_response(real):
    before = aborted(real.metrics())
    host, port = real.url.removeprefix("http://").split(":")
    body = b'{"prompt": "Count:", "max_tokens": 1500, "ignore_eos": true}'
    head = f"POST {TEXT} HTTP/1.1\r\nHost: {host}\r\n{JSON_TYPE}Content-Length: {len(body)}\r\n\r\n".encode()
    with socket.create_connection((host, int(port))) as client:
        client.sendall(head + body)
        real.metrics_when(lambda m: m["vllm:num_requests_running"] == 1)
    real.metrics_when(lambda m: aborted(m) == before + 1 and m['octavo:kv_blocks{state="in_use"}'] == 0)
