"""Every invalid input gets a status, an error body and a message that names the field; the server keeps serving."""

import json
import re

import pytest
from octavo_engine.sampling.sampler import NO_TOKEN_LEFT
from octavo_testing.server import MODEL, events
from openai import BadRequestError, NotFoundError

pytestmark = pytest.mark.asyncio(loop_scope="module")

HELLO = [{"role": "user", "content": "hi"}]
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


BAD_FIELDS = {
    # body fields -> the field that the error names
    "max_tokens zero": (TEXT, {"max_tokens": 0}, "max_tokens"),
    "max_tokens negative": (CHAT, {"max_tokens": -1}, "max_tokens"),
    "max_completion_tokens zero": (CHAT, {"max_completion_tokens": 0}, "max_tokens"),
    "max_tokens a fraction": (TEXT, {"max_tokens": 1.5}, "max_tokens"),
    "max_tokens a word": (TEXT, {"max_tokens": "many"}, "max_tokens"),
    "min_tokens above max_tokens": (TEXT, {"min_tokens": 20}, "min_tokens"),
    "temperature negative": (CHAT, {"temperature": -0.1}, "temperature"),
    "temperature too high": (CHAT, {"temperature": 2.1}, "temperature"),
    "temperature a word": (CHAT, {"temperature": "hot"}, "temperature"),
    "top_p zero": (CHAT, {"top_p": 0}, "top_p"),
    "top_p above one": (CHAT, {"top_p": 1.01}, "top_p"),
    "top_k below -1": (TEXT, {"top_k": -2}, "top_k"),
    "top_k beyond 64 bits": (TEXT, {"top_k": 10**30}, "top_k"),
    "min_p above one": (TEXT, {"min_p": 2}, "min_p"),
    "presence_penalty": (CHAT, {"presence_penalty": 3}, "presence_penalty"),
    "frequency_penalty": (CHAT, {"frequency_penalty": -3}, "frequency_penalty"),
    "repetition_penalty": (CHAT, {"repetition_penalty": 0}, "repetition_penalty"),
    "n zero": (CHAT, {"n": 0}, "n"),
    "n greedy": (CHAT, {"n": 2, "temperature": 0}, "n"),
    "seed beyond 64 bits": (CHAT, {"seed": 2**65}, "seed"),
    "stop empty": (CHAT, {"stop": ""}, "stop"),
    "stop of numbers": (CHAT, {"stop": [1]}, "stop"),
    "stop_token_ids": (CHAT, {"stop_token_ids": [10**9]}, "stop_token_ids"),
    "logit_bias outside the vocabulary": (CHAT, {"logit_bias": {"9999": 1}}, "logit_bias"),
    "logit_bias of a word": (CHAT, {"logit_bias": {"yes": 1}}, "logit_bias"),
    "allowed_token_ids empty": (CHAT, {"allowed_token_ids": []}, "allowed_token_ids"),
    "too many logprobs": (TEXT, {"logprobs": 21}, "logprobs"),
    "too many top_logprobs": (CHAT, {"logprobs": True, "top_logprobs": 21}, "logprobs"),
    "top_logprobs without logprobs": (CHAT, {"top_logprobs": 2}, "top_logprobs"),
    "prompt_logprobs streamed": (TEXT, {"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
    "stream_options without stream": (CHAT, {"stream_options": {"include_usage": True}}, "stream_options"),
    "cache_salt empty": (CHAT, {"cache_salt": ""}, "cache_salt"),
    "priority without the policy": (CHAT, {"priority": 1}, "priority"),
    "messages empty": (CHAT, {"messages": []}, "messages"),
    "messages a word": (CHAT, {"messages": "hi"}, "messages"),
    "message without a role": (CHAT, {"messages": [{"content": "hi"}]}, "messages[0].role"),
    "an image": (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages[0].content[0]",
    ),
    "settings of images": (CHAT, {"mm_processor_kwargs": {"size": {"longest_edge": 9}}}, "mm_processor_kwargs"),
    "prompt empty": (TEXT, {"prompt": ""}, "prompt"),
    "prompt an empty list": (TEXT, {"prompt": []}, "prompt"),
    "prompt holds an empty one": (TEXT, {"prompt": ["a", ""]}, "prompt"),
    "prompt of mixed types": (TEXT, {"prompt": [1, "a"]}, "prompt"),
    "prompt outside the vocabulary": (TEXT, {"prompt": [5, 100_000]}, "prompt"),
    "prompt negative": (TEXT, {"prompt": [-1], "echo": True}, "prompt"),
    "prompt beyond 64 bits": (TEXT, {"prompt": [2**70]}, "prompt"),
    "template arguments that are taken": (CHAT, {"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    "both ends of a message": (
        CHAT,
        {"continue_final_message": True, "add_generation_prompt": True},
        "continue_final_message",
    ),
}

LATER = {
    "best_of": (TEXT, {"best_of": 3}),
    "suffix": (TEXT, {"suffix": "end"}),
    "repetition_detection": (TEXT, {"repetition_detection": {"max_pattern_size": 3}}),
    "mm_processor_kwargs": (TEXT, {"mm_processor_kwargs": {"size": {"longest_edge": 9}}}),
    "multi_modal_data": (TEXT, {"multi_modal_data": {"image": "AAAA"}}),
    "modalities": (CHAT, {"modalities": ["text", "audio"]}),
}


async def refused(served, path, fields, status=400):
    base = {"messages": HELLO} if path == CHAT else {"prompt": "hi"}
    answer = await served.http.post(path, json={**base, **fields})
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == ("context_length_exceeded" if "context length" in error["message"] else status)
    assert (await served.http.post(TEXT, json={"prompt": "a"})).status_code == 200
    return error


@pytest.mark.parametrize(("path", "fields", "param"), BAD_FIELDS.values(), ids=BAD_FIELDS)
async def test_error_names_a_field_out_of_range(served, path, fields, param):
    error = await refused(served, path, fields)
    assert error["param"] == param
    assert error["type"] in ("BadRequestError", "Bad Request")


PAYLOAD = "data:image/png;base64," + "iVBORw0KGgo" * 8
IMAGE = {"type": "image_url", "image_url": {"url": PAYLOAD}}
MISPLACED = {
    "in a text": [{"role": "user", "content": [{"type": "text", "text": {"url": PAYLOAD}}]}],
    "as the type": [{"role": "user", "content": [{"type": [PAYLOAD], "image_url": PAYLOAD}]}],
    "as the content": [{"role": "user", "content": IMAGE}],
    "as a message": [IMAGE],
    "as the role": [{"role": IMAGE, "content": "a"}],
    "as a name": [{"role": "user", "content": "a", "name": IMAGE}],
    "of another type": [{"role": "user", "content": [{"type": "image", "image": PAYLOAD}]}],
    "as an object": [{"role": "user", "content": [{"type": "image_url", "image_url": [PAYLOAD]}]}],
    "of a tool": [{"role": "tool", "tool_call_id": "a", "content": [IMAGE]}],
}


@pytest.mark.parametrize("messages", MISPLACED.values(), ids=MISPLACED)
async def test_no_data_of_an_image_are_in_an_error_or_a_log_line(served, caplog, messages):
    caplog.set_level("DEBUG")
    error = await refused(served, CHAT, {"messages": messages})
    assert "iVBORw0KGgo" not in error["message"] + caplog.text


async def test_no_data_of_an_image_are_quoted_from_json_that_is_broken(served):
    raw = json.dumps({"messages": [{"role": "user", "content": [IMAGE]}]})
    for body in (raw[:-30], raw.replace("iVBORw0KGgo", "iVBORw0KGgo\\x", 1), raw + PAYLOAD):
        answer = await served.http.post(CHAT, content=body, headers={"content-type": "application/json"})
        assert answer.status_code == 400
        assert "iVBORw0KGgo" not in answer.text


@pytest.mark.parametrize(("path", "fields"), LATER.values(), ids=LATER)
async def test_error_names_an_unsupported_field(served, path, fields):
    error = await refused(served, path, fields)
    assert error["param"] == next(iter(fields))
    assert f"{error['param']} is not supported" in error["message"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("prompt_tokens", "max_tokens", "wanted"),
    [(512, 1, 1), (600, None, 16)],
    ids=["no room", "prompt too long"],
)
async def test_context_length_error_has_the_text_that_agents_parse(served, prompt_tokens, max_tokens, wanted, stream):
    fields = {"prompt": [65] * prompt_tokens, "max_tokens": max_tokens, "stream": stream}
    error = await refused(served, TEXT, fields)
    assert (error["type"], error["param"]) == ("BadRequestError", "input_tokens")
    numbers = re.search(
        r"maximum context length is (\d+) tokens.*?requested (\d+) output tokens.*?at least (\d+) input tokens",
        error["message"],
    )
    assert [int(number) for number in numbers.groups()] == [512, wanted, prompt_tokens]
    assert error["message"].endswith(f"(parameter=input_tokens, value={prompt_tokens}) (code=context_length_exceeded)")


async def test_conversation_beyond_the_context_is_rejected(served):
    error = await refused(served, CHAT, {"messages": [{"role": "user", "content": "x" * 600}]})
    assert error["param"] == "input_tokens"


@pytest.mark.parametrize("path", [CHAT, TEXT, "/tokenize", "/detokenize"])
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'"text"',
        b"\xff\xfe{}",
        b'{"prompt": "\xff", "messages": []}',
        b'{"prompt": "\\ud800", "tokens": ["\\ud800"], "messages": [{"role": "user", "content": "\\ud800"}]}',
        b"[" * 5000,
        b'{"a":' * 5000,
        b'{"temperature": NaN, "prompt": "a", "messages": [], "tokens": NaN}',
    ],
    ids=["empty", "cut", "null", "list", "string", "utf-16", "latin-1", "surrogate", "deep", "deep object", "nan"],
)
async def test_body_that_is_not_a_request_is_rejected(served, path, body):
    answer = await served.http.post(path, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] in ("Bad Request", "BadRequestError")


async def test_error_names_all_wrong_fields(served):
    error = await refused(served, CHAT, {"temperature": "x", "seed": [], "n": {}})
    assert all(f"{name}: " in error["message"] for name in ("temperature", "seed", "n"))


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_unknown_model_gives_a_404(served, path):
    error = await refused(served, path, {"model": "gpt-x"}, status=404)
    assert (error["type"], error["message"]) == ("NotFoundError", "The model `gpt-x` does not exist.")


async def test_openai_client_raises_its_own_errors(served):
    with pytest.raises(NotFoundError, match="does not exist"):
        await served.openai.chat.completions.create(model="nope", messages=HELLO)
    with pytest.raises(BadRequestError, match="temperature must be in") as caught:
        await served.openai.chat.completions.create(model=MODEL, messages=HELLO, temperature=5)
    assert (caught.value.param, caught.value.type) == ("temperature", "BadRequestError")


async def test_unknown_route_and_method_have_error_bodies(served):
    answer = await served.http.get("/v1/nothing")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, 404)
    answer = await served.http.get(CHAT)
    assert (answer.status_code, answer.json()["error"]["type"]) == (405, "Method Not Allowed")


async def test_failed_generation_gives_a_500_that_may_be_retried(served):
    served.engine.fail_at = 2
    answer = await served.http.post(TEXT, json={"prompt": "a"})
    assert answer.status_code == 500
    assert answer.json()["error"] == {
        "message": "the step failed: scripted",
        "type": "InternalServerError",
        "param": None,
        "code": 500,
    }


async def test_request_that_bans_every_token_gives_a_400(served):
    served.engine.fail_at, served.engine.failure = 0, NO_TOKEN_LEFT
    answer = await served.http.post(TEXT, json={"prompt": "a"})
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "BadRequestError")
    assert "leave no token" in answer.json()["error"]["message"]


async def test_failure_before_the_first_token_sets_the_status(served):
    served.engine.fail_at = 0
    answer = await served.http.post(CHAT, json={"messages": HELLO, "stream": True})
    assert (answer.status_code, answer.headers["content-type"]) == (500, "application/json")


async def test_failure_in_mid_stream_is_an_event_before_done(served):
    served.engine.fail_at = 3
    answer = await served.http.post(CHAT, json={"messages": HELLO, "stream": True})
    *_, text, error, done = events(answer.text)
    assert '"content":"l"' in text
    assert '"code":500' in error
    assert done == "[DONE]"


async def test_unexpected_error_gives_a_500_without_details(served, monkeypatch):
    monkeypatch.setattr(served.engine, "_play_events", None)
    answer = await served.http.post(TEXT, json={"prompt": ["a", "b"]})
    assert answer.status_code == 500
    assert answer.json()["error"]["message"] == "Internal server error."


async def test_unexpected_error_gives_a_500_with_the_request_id(served, monkeypatch, caplog):
    def broken(*args, **kwargs):
        raise RuntimeError("a bug")

    monkeypatch.setattr(served.engine, "debug_requests", broken)
    answer = await served.http.get("/debug/requests", headers={"x-request-id": "mine"})
    assert (answer.status_code, answer.headers.get_list("x-request-id")) == (500, ["mine"])
    assert answer.json()["error"]["type"] == "InternalServerError"
    assert "request mine failed" in caplog.text
    assert (await served.http.get("/health")).status_code == 200
