"""Fields of a response besides its text: rows 19-24."""

import math
import re

import pytest
from octavo_engine.wire.sampling import DRAW_VERSION
from octavo_testing.conformance import conforms
from octavo_testing.server import MODEL
from octavo_testing.target import REAL_MODEL
from openai import BadRequestError, InternalServerError

pytestmark = pytest.mark.slow

HELLO = [{"role": "user", "content": "hi"}]
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


@conforms(19, "`finish_reason` is stop or length", how="openai")
async def test_responses_have_finish_reasons(scripted):
    create = scripted.openai.chat.completions.create
    reasons = [
        (await create(model=MODEL, messages=HELLO, **fields)).choices[0].finish_reason
        for fields in ({}, {"stop": "o"}, {"max_tokens": 2})
    ]
    assert reasons == ["stop", "stop", "length"]


@conforms(19, "A request that fails in the engine gets a 500", how="openai")
async def test_engine_errors_give_a_500(scripted):
    scripted.engine.fail_at = 2
    with pytest.raises(InternalServerError) as caught:
        await scripted.openai.chat.completions.create(model=MODEL, messages=HELLO)
    assert (caught.value.type, caught.value.body["code"]) == ("InternalServerError", 500)


@pytest.mark.real_model
@conforms(
    20,
    "`usage` always has `prompt_tokens_details.cached_tokens` (vLLM: with a flag)",
    how="openai",
)
def test_responses_have_usage(real):
    prompt = "The quick brown fox jumps over the lazy dog. " * 8
    first, second = (
        real.openai.completions.create(model=REAL_MODEL, prompt=prompt, max_tokens=2).usage for _ in range(2)
    )
    assert first.total_tokens == first.prompt_tokens + first.completion_tokens
    assert (first.completion_tokens, first.prompt_tokens_details.cached_tokens) == (2, 0)
    assert second.prompt_tokens_details.cached_tokens >= second.prompt_tokens - 32
    *_, last = real.openai.completions.create(
        model=REAL_MODEL, prompt=prompt, max_tokens=2, stream=True, stream_options={"include_usage": True}
    )
    assert last.usage.prompt_tokens_details.cached_tokens == second.prompt_tokens_details.cached_tokens


@conforms(
    21, "`system_fingerprint` is `octavo-VERSION-drawN-HASH`, in a stream in each choice's last chunk", how="openai"
)
def test_responses_have_a_fingerprint(tiny):
    asked = {"model": "tiny", "messages": HELLO, "max_tokens": 3}
    fingerprint = tiny.openai.chat.completions.create(**asked).system_fingerprint
    assert re.fullmatch(rf"octavo-[\w.]+-draw{DRAW_VERSION}-[0-9a-f]{{8}}", fingerprint)
    *chunks, last = tiny.openai.chat.completions.create(**asked, stream=True)
    assert last.system_fingerprint == fingerprint
    assert {chunk.system_fingerprint for chunk in chunks} == {None}


@pytest.mark.real_model
@conforms(22, "Chat logprobs have token, logprob, bytes and `top_logprobs`, streamed or not", how="openai")
def test_chat_responses_have_logprobs(real):
    asked = {"model": REAL_MODEL, "messages": HELLO, "max_tokens": 5, "temperature": 0}
    whole = real.openai.chat.completions.create(**asked, logprobs=True, top_logprobs=3).choices[0]
    positions = whole.logprobs.content
    assert b"".join(bytes(p.bytes) for p in positions).decode() == whole.message.content
    for position in positions:
        values = [top.logprob for top in position.top_logprobs]
        assert (len(values), values) == (3, sorted(values, reverse=True))
        assert math.isclose(position.logprob, values[0], abs_tol=1e-6)
    stream = real.openai.chat.completions.create(**asked, logprobs=True, top_logprobs=3, stream=True)
    choices = [chunk.choices[0] for chunk in stream]
    assert [p.token for c in choices if c.logprobs for p in c.logprobs.content] == [p.token for p in positions]


@conforms(
    22,
    "Completion logprobs have OpenAI's four lists; the first echoed token's logprob is null",
    how="openai",
)
def test_completions_have_logprobs(tiny):
    choice = tiny.openai.completions.create(
        model="tiny", prompt="abc", max_tokens=2, echo=True, logprobs=2, extra_body={"allowed_token_ids": [65, 66]}
    ).choices[0]
    columns = choice.logprobs
    assert "".join(columns.tokens) == choice.text
    assert columns.text_offset == [0, 1, 2, 3, 4]
    assert (columns.token_logprobs[0], columns.top_logprobs[0]) == (None, None)
    assert all(value < 0 for value in columns.token_logprobs[1:])
    assert all(len(top) in (2, 3) for top in columns.top_logprobs[1:])


@conforms(22, "`logprob_token_ids` asks for the log-probabilities of these tokens", how="openai")
def test_logprobs_of_given_tokens(tiny):
    asked = {"model": "tiny", "max_tokens": 1, "logit_bias": {"65": 100}, "extra_body": {"logprob_token_ids": [66, 67]}}
    chat = tiny.openai.chat.completions.create(**asked, messages=HELLO, logprobs=True)
    (token,) = chat.choices[0].logprobs.content
    assert {top.token for top in token.top_logprobs} == {"A", "B", "C"}  # the chosen token stands beside the others
    text = tiny.openai.completions.create(**asked, prompt="hi", logprobs=1)
    assert set(text.choices[0].logprobs.top_logprobs[0]) == {"A", "B", "C"}
    with pytest.raises(BadRequestError, match="logprob_token_ids needs logprobs"):
        tiny.openai.chat.completions.create(**asked, messages=HELLO)


@conforms(22, "Minus infinity is written as -9999.0", how="HTTP")
async def test_minus_infinity_becomes_a_number(scripted):
    answer = await scripted.http.post(TEXT, json={"prompt": "hi", "logprobs": 3})
    tops = answer.json()["choices"][0]["logprobs"]["top_logprobs"]
    assert {min(top.values()) for top in tops} == {-9999.0}


@conforms(
    23, "`prompt_logprobs`, `return_token_ids` and `return_tokens_as_token_ids` are supported", how="openai, HTTP"
)
def test_vllm_s_extra_fields_are_returned(tiny):
    asked = {"model": "tiny", "prompt": "abc", "max_tokens": 2}
    fields = {"prompt_logprobs": 1, "return_token_ids": True, "return_tokens_as_token_ids": True}
    choice = tiny.openai.completions.create(**asked, logprobs=0, extra_body=fields).choices[0]
    assert choice.prompt_token_ids == [97, 98, 99]
    assert choice.logprobs.tokens == [f"token_id:{token}" for token in choice.token_ids]
    assert choice.prompt_logprobs[0] is None
    assert {"logprob", "rank", "decoded_token"} == set(choice.prompt_logprobs[1]["98"])
    chat = tiny.http.post(
        CHAT, json={"messages": HELLO, "max_tokens": 2, "return_token_ids": True, "prompt_logprobs": 0}
    )
    answer = chat.json()
    assert len(answer["prompt_token_ids"]) == len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]
    assert len(answer["choices"][0]["token_ids"]) == 2


@conforms(23, "`kv_transfer_params` is rejected by name", how="openai")
def test_kv_transfer_params_are_rejected(tiny):
    fields = {"kv_transfer_params": {"do_remote_decode": True}}
    with pytest.raises(BadRequestError, match="kv_transfer_params"):
        tiny.openai.completions.create(model="tiny", prompt="a", extra_body=fields)


@conforms(24, "The header `X-data-parallel-rank` is accepted and ignored", how="HTTP")
@pytest.mark.parametrize("rank", ["0", "3", "junk", "-1"])
def test_data_parallel_rank_is_accepted(tiny, rank):
    answer = tiny.http.post(TEXT, json={"prompt": "a", "max_tokens": 1}, headers={"X-data-parallel-rank": rank})
    assert answer.status_code == 200


@conforms(24, "A `priority` other than 0 gets a 400 unless the server schedules by priority", how="openai")
def test_priority_requires_priority_scheduling(tiny):
    tiny.openai.completions.create(model="tiny", prompt="a", max_tokens=1, extra_body={"priority": 0})
    with pytest.raises(BadRequestError, match="priority"):
        tiny.openai.completions.create(model="tiny", prompt="a", extra_body={"priority": 1})
