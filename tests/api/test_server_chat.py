"""`/v1/chat/completions` through a real uvicorn: the official client, and the bytes on the wire."""

import json

import pytest
from octavo_engine.text.template import ChatTemplate
from octavo_testing.scripted import write_byte_model
from octavo_testing.server import MODEL, ScriptedClient, events, serving

pytestmark = pytest.mark.asyncio(loop_scope="module")

HELLO = [{"role": "user", "content": "hi"}]


async def chat(served, **fields):
    return await served.openai.chat.completions.create(**{"model": MODEL, "messages": HELLO, **fields})


async def chunks(served, **fields):
    return [chunk async for chunk in await chat(served, stream=True, **fields)]


async def raw_chunks(served, **fields):
    answer = await served.http.post("/v1/chat/completions", json={"messages": HELLO, "stream": True, **fields})
    assert answer.status_code == 200
    return [json.loads(event) for event in events(answer.text)[:-1]]


async def test_plain_response_has_all_fields(served):
    answer = await chat(served)
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", "Hello, world!")
    assert (choice.finish_reason, choice.stop_reason, choice.logprobs) == ("stop", None, None)
    assert (answer.object, answer.model) == ("chat.completion", MODEL)
    assert answer.id.startswith("chatcmpl-")
    assert answer.system_fingerprint.startswith("octavo-")
    (request,) = served.engine.requests
    prompt = served.engine.frontend.tokenizer.decode(request.prompt_token_ids, skip_special_tokens=False)
    assert prompt == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


async def test_usage_counts_prompt_output_and_cached_tokens(served):
    served.engine.num_cached_tokens = 16
    usage = (await chat(served)).usage
    num_prompt = len(served.engine.requests[0].prompt_token_ids)
    assert (usage.prompt_tokens, usage.completion_tokens) == (num_prompt, len("Hello, world!") + 1)
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.prompt_tokens_details.cached_tokens == 16


async def test_a_stream_opens_with_the_role_and_ends_with_the_reason(served):
    got = await raw_chunks(served)
    first, *middle, last = got
    assert first["choices"] == [
        {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    ]
    text = "".join(c["choices"][0]["delta"]["content"] for c in got)
    assert text == "Hello, world!"
    assert all(c["choices"][0]["delta"]["content"] and c["choices"][0]["finish_reason"] is None for c in middle)
    assert (last["choices"][0]["finish_reason"], last["choices"][0]["stop_reason"]) == ("stop", None)
    assert last["system_fingerprint"]
    assert "system_fingerprint" not in first
    assert len({(c["id"], c["created"], c["model"], c["object"]) for c in got}) == 1
    assert all("usage" not in c for c in got)


async def test_stream_has_sse_headers_and_ends_with_done(served):
    answer = await served.http.post("/v1/chat/completions", json={"messages": HELLO, "stream": True})
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert events(answer.text)[-1] == "[DONE]"


async def test_openai_client_reads_a_stream(served):
    got = await chunks(served)
    assert "".join(c.choices[0].delta.content for c in got) == "Hello, world!"
    assert got[-1].choices[0].finish_reason == "stop"


async def test_requested_usage_is_the_last_chunk(served):
    served.engine.num_cached_tokens = 8
    *others, last = await chunks(served, stream_options={"include_usage": True})
    assert last.choices == []
    assert last.usage.completion_tokens == 14
    assert last.usage.prompt_tokens_details.cached_tokens == 8
    assert all(c.usage is None for c in others)


async def test_continuous_usage_grows(served):
    options = {"include_usage": True, "continuous_usage_stats": True}
    got = await raw_chunks(served, stream_options=options)
    counts = [c["usage"]["completion_tokens"] for c in got if "usage" in c]
    assert counts == sorted(counts)
    assert (counts[0], counts[-1], len(counts)) == (0, 14, len(got))


async def test_each_of_n_choices_has_its_own_text(served):
    served.engine.replies = ["one", "two!", "three"]
    answer = await chat(served, n=3, seed=0)
    assert [c.message.content for c in answer.choices] == ["one", "two!", "three"]
    assert answer.usage.completion_tokens == len("one") + len("two!") + len("three") + 3


async def test_streamed_choices_have_their_own_text(served):
    served.engine.replies = ["one", "two!"]
    got = await chunks(served, n=2)
    assert [c.choices[0].index for c in got[:2]] == [0, 1]
    assert all(c.choices[0].delta.role == "assistant" for c in got[:2])
    for index, text in enumerate(served.engine.replies):
        mine = [c.choices[0] for c in got if c.choices[0].index == index]
        assert "".join(c.delta.content for c in mine) == text
        assert [c.finish_reason for c in mine if c.finish_reason] == ["stop"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_ends_the_text_before_it(served, stream):
    served.engine.replies = ["go on STOP never"]
    if stream:
        got = await chunks(served, stop=["STOP", "x"])
        text, choice = "".join(c.choices[0].delta.content for c in got), got[-1].choices[0]
    else:
        choice = (await chat(served, stop=["STOP", "x"])).choices[0]
        text = choice.message.content
    assert (text, choice.finish_reason, choice.stop_reason) == ("go on ", "stop", "STOP")


async def test_max_completion_tokens_overrides_max_tokens(served):
    answer = await chat(served, max_tokens=9, max_completion_tokens=4)
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("Hell", "length")


async def test_output_is_limited_by_the_context_if_no_limit_is_set(served):
    await chat(served)
    (request,) = served.engine.requests
    assert request.params.max_tokens == 512 - len(request.prompt_token_ids)


@pytest.mark.parametrize("text", ["naïve 🎉 日本語", "👨‍👩‍👧‍👦", "a\u0301"])
async def test_a_character_is_never_split(served, text):
    served.engine.replies = [text]
    parts = [c.choices[0].delta.content for c in await chunks(served)]
    assert "".join(parts) == text
    assert not any("\N{REPLACEMENT CHARACTER}" in part for part in parts)


async def test_logprobs_are_returned_for_each_token(served):
    answer = await chat(served, logprobs=True, top_logprobs=3, max_tokens=2)
    first, second = answer.choices[0].logprobs.content
    assert (first.token, first.logprob, first.bytes) == ("H", -0.3, [ord("H")])
    assert [t.token for t in first.top_logprobs] == ["I", "H", "J"]
    assert second.token == "e"


async def test_logprob_of_an_impossible_token_is_finite(served):
    answer = await chat(served, logprobs=True, top_logprobs=2, max_tokens=1, extra_body={"prompt_logprobs": 2})
    assert answer.prompt_logprobs[0] is None
    assert sorted(entry["logprob"] for entry in answer.prompt_logprobs[1].values()) == [-9999.0, -0.3, -0.25]


async def test_logprobs_of_held_back_tokens_arrive_with_their_text(served):
    served.engine.replies = ["é!"]
    got = await chunks(served, logprobs=True, stop=["!?"])
    tokens = [[bytes(t.bytes) for t in c.choices[0].logprobs.content] for c in got if c.choices[0].logprobs]
    assert tokens == [["é".encode()[:1], "é".encode()[1:]], [b"!", b"<|endoftext|>"]]


async def test_token_ids_are_returned_on_request(served):
    answer = await chat(served, extra_body={"return_token_ids": True})
    assert answer.prompt_token_ids == served.engine.requests[0].prompt_token_ids
    assert answer.choices[0].token_ids[:2] == [ord("H"), ord("e")]
    got = await raw_chunks(served, return_token_ids=True)
    assert got[0]["prompt_token_ids"] == answer.prompt_token_ids
    assert [t for c in got[1:] for t in c["choices"][0]["token_ids"]] == answer.choices[0].token_ids


async def test_tokens_are_written_as_ids_on_request(served):
    fields = {"logprobs": True, "top_logprobs": 1, "max_tokens": 1}
    answer = await chat(served, **fields, extra_body={"return_tokens_as_token_ids": True})
    (token,) = answer.choices[0].logprobs.content
    assert (token.token, token.top_logprobs[0].token) == ("token_id:72", "token_id:73")


async def test_content_may_be_parts_or_null(served):
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    await chat(served, messages=[{"role": "user", "content": parts}, {"role": "assistant", "content": None}])
    prompt = served.engine.prompt_text(0)
    assert "<|im_start|>user\none\ntwo<|im_end|>\n<|im_start|>assistant\n<|im_end|>" in prompt


async def test_echo_continues_the_last_message(served):
    messages = [*HELLO, {"role": "assistant", "content": "Well. "}]
    assert (await chat(served, messages=messages, extra_body={"echo": True})).choices[0].message.content == (
        "Well. Hello, world!"
    )


async def test_unset_sampling_fields_get_the_defaults_of_the_model(served, monkeypatch):
    defaults = {"temperature": 0.5, "top_p": 0.9, "max_tokens": 3}
    monkeypatch.setattr(served.engine.frontend, "default_sampling_params", defaults)
    await chat(served, top_p=0.7)
    params = served.engine.requests[0].params
    assert (params.temperature, params.top_p, params.max_tokens) == (0.5, 0.7, 3)


async def test_default_length_of_the_model_shrinks_to_the_free_context(served, monkeypatch):
    monkeypatch.setattr(served.engine.frontend, "default_sampling_params", {"max_tokens": 5000})
    await chat(served)
    (request,) = served.engine.requests
    assert request.params.max_tokens == 512 - len(request.prompt_token_ids)


async def test_every_sampling_field_reaches_the_engine(served):
    fields = {
        "temperature": 0.7, "top_p": 0.8, "presence_penalty": 0.1, "frequency_penalty": 0.2, "seed": 5,
        "logit_bias": {"65": 4},
    }  # fmt: skip
    extra = {
        "top_k": 7, "min_p": 0.1, "repetition_penalty": 1.1, "min_tokens": 2, "stop_token_ids": [66],
        "bad_words": ["no"], "allowed_token_ids": [65, 66], "ignore_eos": True, "skip_special_tokens": False,
        "include_stop_str_in_output": True,
    }  # fmt: skip
    await chat(served, max_tokens=4, **fields, extra_body=extra)
    params = served.engine.requests[0].params
    got = {name: getattr(params, name) for name in {**fields, **extra}}
    assert got == {**fields, **extra, "logit_bias": {65: 4.0}}


async def test_unknown_fields_and_nulls_are_accepted(served):
    nulls = dict.fromkeys(("n", "stop", "temperature", "max_tokens", "stream_options", "tools", "response_format"))
    body = {
        "messages": HELLO,
        **nulls,
        "invented": {"a": 1},
        "response_format": {"type": "text"},
        "tool_choice": "none",
    }
    assert (await served.http.post("/v1/chat/completions", json=body)).status_code == 200


async def test_request_id_is_echoed_and_part_of_the_response_id(served):
    answer = await served.http.post(
        "/v1/chat/completions", json={"messages": HELLO}, headers={"X-Request-Id": "trace-7"}
    )
    assert answer.headers["x-request-id"] == "trace-7"
    assert answer.json()["id"] == "chatcmpl-trace-7"
    answer = await served.http.post("/v1/chat/completions", json={"messages": HELLO, "request_id": "mine"})
    assert answer.json()["id"] == "chatcmpl-mine"


@pytest.mark.parametrize("given", ["x]\n12:00:00 CRITICAL [0] forged", "a b", "é", "\x1b[31m"])
async def test_request_id_of_a_body_that_could_forge_a_log_line_is_replaced(served, given):
    body = {"messages": HELLO, "request_id": given}
    answer = await served.http.post("/v1/chat/completions", json=body, headers={"X-Request-Id": "trace-7"})
    assert answer.json()["id"] == "chatcmpl-trace-7"


async def test_usage_is_forced_by_the_flag(tmp_path):
    async with serving(ScriptedClient(write_byte_model(tmp_path)), enable_force_include_usage=True) as served:
        assert (await chunks(served))[-1].usage.completion_tokens == 14


async def test_a_final_message_can_be_continued(served):
    messages = [*HELLO, {"role": "assistant", "content": "Well, "}]
    await chat(served, messages=messages, extra_body={"continue_final_message": True})
    prompt = served.engine.prompt_text(0)
    assert prompt == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nWell, "


async def test_model_without_a_template_gives_a_400(served, monkeypatch):
    monkeypatch.setattr(served.engine.frontend, "chat_template", None)
    answer = await served.http.post("/v1/chat/completions", json={"messages": HELLO})
    assert answer.status_code == 400
    assert "--chat-template" in answer.json()["error"]["message"]


async def test_error_raised_by_a_template_gives_a_400(served, monkeypatch):
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}")
    monkeypatch.setattr(served.engine.frontend, "chat_template", template)
    answer = await served.http.post("/v1/chat/completions", json={"messages": HELLO})
    assert answer.status_code == 400
    assert "roles must alternate" in answer.json()["error"]["message"]
