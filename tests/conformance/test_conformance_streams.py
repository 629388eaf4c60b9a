"""Frames of a stream: rows 12-18."""

import json

import pytest
from octavo_testing.conformance import conforms
from octavo_testing.server import MODEL, events
from octavo_testing.target import REAL_MODEL
from openai import APIError, InternalServerError

pytestmark = pytest.mark.slow

HELLO = [{"role": "user", "content": "hi"}]
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
BOTH = pytest.mark.parametrize(("path", "body"), [(CHAT, {"messages": HELLO}), (TEXT, {"prompt": "hi"})])


async def streamed(scripted, path, body, **fields):
    answer = await scripted.http.post(path, json={**body, "stream": True, **fields})
    assert answer.status_code == 200
    *chunks, done = events(answer.text)
    assert done == "[DONE]"
    return [json.loads(chunk) for chunk in chunks]


@conforms(12, "`text/event-stream; charset=utf-8`, frames `data: {json}`, `data: [DONE]` last", how="HTTP")
@pytest.mark.parametrize(("path", "body"), [(CHAT, {"messages": HELLO}), (TEXT, {"prompt": "hi"})])
def test_stream_has_sse_frames(tiny, path, body):
    answer = tiny.http.post(path, json={**body, "max_tokens": 4, "stream": True})
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    *chunks, done = events(answer.text)
    assert done == "[DONE]"
    assert all("choices" in json.loads(chunk) for chunk in chunks)


@conforms(12, "An error in mid-stream is a frame `{error: {...}}` before `[DONE]`", how="openai, HTTP")
@BOTH
async def test_errors_in_mid_stream_are_events(scripted, path, body):
    scripted.engine.fail_at = 3
    *_, error = await streamed(scripted, path, body)
    assert set(error) == {"error"}
    assert error["error"]["code"] == 500
    stream = await scripted.openai.chat.completions.create(model=MODEL, messages=HELLO, stream=True)
    with pytest.raises(APIError, match="scripted"):
        assert [chunk async for chunk in stream]


@conforms(
    13,
    'The first chat chunk of each choice has `delta: {"role": "assistant", "content": ""}`'
    " and null `finish_reason` and `logprobs`",
    how="HTTP",
)
async def test_first_chunks_have_the_role(scripted):
    chunks = await streamed(scripted, CHAT, {"messages": HELLO}, n=2)
    expected = {"delta": {"role": "assistant", "content": ""}, "finish_reason": None, "logprobs": None}
    assert [chunk["choices"] for chunk in chunks[:2]] == [[{"index": 0, **expected}], [{"index": 1, **expected}]]
    assert all("finish_reason" in chunk["choices"][0] for chunk in chunks)


@conforms(
    14,
    "A choice's last chunk has `finish_reason` and `stop_reason` (the matched string or token id, null for EOS)",
    how="openai",
)
@pytest.mark.parametrize(
    ("fields", "reason", "matched"),
    [
        ({}, "stop", None),
        ({"stop": "wor"}, "stop", "wor"),
        ({"max_tokens": 3}, "length", None),
    ],
)
async def test_last_chunks_have_the_finish_reason(scripted, fields, reason, matched):
    stream = await scripted.openai.chat.completions.create(model=MODEL, messages=HELLO, stream=True, extra_body=fields)
    choices = [chunk.choices[0] async for chunk in stream]
    assert [choice.finish_reason for choice in choices[:-1]] == [None] * (len(choices) - 1)
    assert (choices[-1].finish_reason, choices[-1].stop_reason) == (reason, matched)


@conforms(14, "An unstreamed response has `finish_reason` and `stop_reason` too", how="openai")
def test_plain_responses_have_finish_reasons(tiny):
    fields = {"allowed_token_ids": [65], "stop_token_ids": [65]}
    (choice,) = tiny.openai.completions.create(model="tiny", prompt="a", extra_body=fields).choices
    assert (choice.finish_reason, choice.stop_reason) == ("stop", 65)


@conforms(
    15,
    "`include_usage` adds a chunk with `usage` and `choices: []`, `continuous_usage_stats` adds `usage` to all chunks",
    how="openai",
)
def test_usage_is_streamed_on_request(tiny):
    def stream(**options):
        return list(
            tiny.openai.chat.completions.create(
                model="tiny", messages=HELLO, max_tokens=6, stream=True, stream_options=options or None,
                extra_body={"allowed_token_ids": [65]},
            )
        )  # fmt: skip

    assert [chunk.usage for chunk in stream() if chunk.usage] == []
    *chunks, last = stream(include_usage=True)
    assert (last.choices, last.usage.completion_tokens, [c for c in chunks if c.usage]) == ([], 6, [])
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in [*chunks, last]}) == 1
    counts = [c.usage.completion_tokens for c in stream(include_usage=True, continuous_usage_stats=True) if c.usage]
    assert counts == [*range(7), 6]


@conforms(16, "No empty chunks while a long prompt is computed in several steps", how="openai")
def test_chunked_prefill_sends_no_empty_chunk(tiny):
    stream = tiny.openai.completions.create(
        model="tiny", prompt="x" * 200, max_tokens=5, stream=True, extra_body={"allowed_token_ids": [66]}
    )
    assert [chunk.choices[0].text for chunk in stream] == ["B"] * 5


@conforms(17, "Characters of several bytes arrive whole", how="openai")
async def test_multibyte_characters_are_not_split(scripted):
    text = "naïve 日本語 👩‍🚀 end"
    scripted.engine.replies = [text]
    stream = await scripted.openai.chat.completions.create(model=MODEL, messages=HELLO, stream=True)
    pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
    assert not any("\ufffd" in piece for piece in pieces)
    assert "".join(pieces) == text


@conforms(
    18,
    "An error before the first token sets the HTTP status (vLLM: 200, then an error frame)",
    how="openai",
)
async def test_errors_before_the_first_token_set_the_status(scripted):
    scripted.engine.fail_at = 0
    with pytest.raises(InternalServerError) as caught:
        await scripted.openai.chat.completions.create(model=MODEL, messages=HELLO, stream=True)
    assert caught.value.response.headers["content-type"] == "application/json"


@pytest.mark.real_model
@conforms(12, "The joined stream equals the unstreamed answer", how="openai")
def test_real_model_streams(real):
    question = [{"role": "user", "content": "What is the capital of France? Answer with one word."}]
    asked = {"model": REAL_MODEL, "messages": question, "temperature": 0}
    stream = real.openai.chat.completions.create(**asked, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert "Paris" in text
    assert real.openai.chat.completions.create(**asked).choices[0].message.content == text
