"""A prompt that is too long, in the words of each dialect: agents recognise them and shorten the conversation."""

import re

import anthropic
import openai
import pytest
import pytest_asyncio
from octavo_testing.scripted import write_byte_model
from octavo_testing.server import MODEL, ScriptedClient, serving

pytestmark = pytest.mark.asyncio(loop_scope="module")

CONTEXT = 128
LONG = "a" * 200
TOO_LONG = re.compile(r"^prompt is too long: (\d+) tokens > (\d+) maximum")


def chat(text):
    return [{"role": "user", "content": text}]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tmp_path_factory):
    engine = ScriptedClient(write_byte_model(tmp_path_factory.mktemp("model")), max_model_len=CONTEXT)
    async with serving(engine) as started:
        yield started


REQUESTS = {
    "chat": lambda api, **f: api.chat.completions.create(model=MODEL, messages=chat(LONG), **f),
    "completion": lambda api, **f: api.completions.create(model=MODEL, prompt=LONG, **f),
    "token ids": lambda api, **f: api.completions.create(model=MODEL, prompt=[65] * CONTEXT, **f),
    "response": lambda api, **f: api.responses.create(model=MODEL, input=LONG, **f),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("send", REQUESTS.values(), ids=REQUESTS.keys())
async def test_openais_clients_get_a_code(at, send, stream):
    with pytest.raises(openai.BadRequestError, match="maximum context length is 128 tokens") as refused:
        await send(at.openai, stream=stream)
    assert (refused.value.code, refused.value.type, refused.value.param) == (
        "context_length_exceeded",
        "BadRequestError",
        "input_tokens",
    )


@pytest.mark.parametrize("stream", [False, True])
async def test_anthropics_clients_get_both_numbers(anthropic_client, stream):
    with pytest.raises(anthropic.BadRequestError) as refused:
        await anthropic_client.messages.create(model=MODEL, max_tokens=9, messages=chat(LONG), stream=stream)
    error = refused.value.body["error"]
    assert error["type"] == "invalid_request_error"
    num_tokens, most = map(int, TOO_LONG.match(error["message"]).groups())
    assert (most, num_tokens > 200) == (CONTEXT, True)
    rest = CONTEXT - (num_tokens - 200)
    with pytest.raises(anthropic.BadRequestError) as refused:  # no token is left for the answer
        await anthropic_client.messages.create(model=MODEL, max_tokens=9, messages=chat("a" * rest))
    assert refused.value.body["error"]["message"].startswith(f"prompt is too long: {CONTEXT} tokens > {CONTEXT - 1} ")


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_a_full_context_ends(anthropic_client, served, stream):
    served.engine.replies = ["b" * CONTEXT]

    async def stop_of(num_chars, max_tokens):
        fields = {"model": MODEL, "max_tokens": max_tokens, "messages": chat("a" * num_chars)}
        if not stream:
            return (await anthropic_client.messages.create(**fields)).stop_reason
        async with anthropic_client.messages.stream(**fields) as answer:
            return (await answer.get_final_message()).stop_reason

    num_other = (await anthropic_client.messages.count_tokens(model=MODEL, messages=chat("a"))).input_tokens - 1
    room = CONTEXT - num_other - 20
    assert await stop_of(20, room - 1) == "max_tokens"
    assert await stop_of(20, room) == "max_tokens"
    assert await stop_of(20, room + 1) == "model_context_window_exceeded"
    assert await stop_of(20, 4096) == "model_context_window_exceeded"
