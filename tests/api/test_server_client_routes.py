"""Small routes and headers that clients of both dialects use: counts, compaction, models, request ids, named calls."""

import json

import anthropic
import pytest
from octavo_testing.scripted import write_byte_model
from octavo_testing.server import MODEL, ScriptedClient, events, serving

pytestmark = pytest.mark.asyncio(loop_scope="module")

USER = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
NAMED = {"type": "function", "function": {"name": "f"}}
KEY = "sk-test"


async def test_input_tokens_are_counted_as_they_are_used(at, served):
    asked = {"model": MODEL, "input": "hi", "instructions": "Be short."}
    counted = await at.openai.responses.input_tokens.count(**asked)
    answer = await at.openai.responses.create(**asked)
    assert (counted.object, counted.input_tokens) == ("response.input_tokens", answer.usage.input_tokens)


async def test_compaction_is_not_found(at):
    answer = await at.http.post("/v1/responses/compact", json={"model": MODEL, "input": "hi"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, 404)


async def test_messages_have_a_request_id(at, anthropic_client):
    message = await anthropic_client.messages.create(model=MODEL, max_tokens=3, messages=[USER])
    assert message._request_id
    assert message.id == f"msg_{message._request_id}"
    with pytest.raises(anthropic.NotFoundError) as refused:
        await anthropic_client.messages.create(model="gpt-x", max_tokens=3, messages=[USER])
    assert refused.value.request_id == refused.value.response.headers["x-request-id"]
    for body in ({"max_tokens": 3, "messages": [USER], "model": MODEL, "stream": True}, {}):
        answer = await at.http.post("/v1/messages", json=body)
        assert answer.headers.get_list("request-id") == answer.headers.get_list("x-request-id")
        assert len(answer.headers.get_list("request-id")) == 1
    assert "request-id" not in (await at.http.get("/v1/models")).headers


async def test_models_have_the_form_that_anthropics_client_reads(at, anthropic_client):
    listed = [model async for model in await anthropic_client.models.list()]
    assert [(m.id, m.type, m.display_name, m.lifecycle) for m in listed] == [(MODEL, "model", MODEL, "active")]
    one = await anthropic_client.models.retrieve(MODEL)
    assert (one.id, one.max_input_tokens, one.created_at.tzinfo is not None) == (MODEL, 512, True)
    assert (await at.openai.models.list()).data[0].object == "model"


async def test_models_take_the_key_of_anthropics_client(tmp_path):
    async with serving(ScriptedClient(write_byte_model(tmp_path)), api_key=(KEY,)) as guarded:
        async with anthropic.AsyncAnthropic(base_url=guarded.url, api_key=KEY, max_retries=0) as found:
            assert (await found.models.list()).data[0].id == MODEL
        async with anthropic.AsyncAnthropic(base_url=guarded.url, api_key="wrong", max_retries=0) as stranger:
            with pytest.raises(anthropic.AuthenticationError):
                await stranger.models.list()


@pytest.mark.parametrize(("choice", "first"), [(NAMED, None), ("none", "")])
async def test_the_first_delta_of_a_named_call_has_no_text(at, served, choice, first):
    served.engine.replies = ["{}"]
    body = {"model": MODEL, "messages": [USER], "tools": [TOOL], "tool_choice": choice, "stream": True}
    answer = await at.http.post("/v1/chat/completions", json=body)
    delta = json.loads(events(answer.text)[0])["choices"][0]["delta"]
    assert delta == {"role": "assistant", "content": first}
