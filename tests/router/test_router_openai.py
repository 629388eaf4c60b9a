"""OpenAI's own client through a real router, over two real servers around scripted engines."""

import json

import httpx
import openai
import pytest
import pytest_asyncio
from octavo_server.output_parsing.tool_use import ToolSettings
from octavo_testing.routing import routing
from octavo_testing.scripted import write_byte_model
from octavo_testing.server import MODEL, ScriptedClient, serving

pytestmark = pytest.mark.asyncio(loop_scope="module")

HERMES = ToolSettings(tool_call_parser="hermes", enable_auto_tool_choice=True)
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
HELLO = [{"role": "user", "content": "hi"}]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def both(tmp_path_factory):
    folder = write_byte_model(tmp_path_factory.mktemp("model"))
    one, two = ScriptedClient(folder), ScriptedClient(folder)
    async with (
        serving(one, tools=HERMES) as first,
        serving(two, tools=HERMES) as second,
        routing(first.url, second.url) as routed,
    ):
        await routed.routable(MODEL, 2)
        yield first, second, routed


async def chat(routed, **fields):
    return await routed.openai.chat.completions.create(**{"model": MODEL, "messages": HELLO, **fields})


async def test_a_chat_completion_is_answered(both):
    answer = await chat(both[2])
    assert (answer.choices[0].message.content, answer.model) == ("Hello, world!", MODEL)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


async def test_a_chat_completion_is_streamed(both):
    chunks = [chunk async for chunk in await chat(both[2], stream=True, stream_options={"include_usage": True})]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == "Hello, world!"
    assert chunks[-1].usage.completion_tokens == len("Hello, world!") + 1


async def test_a_completion_and_a_response_are_answered(both):
    routed = both[2]
    assert (await routed.openai.completions.create(model=MODEL, prompt="hi")).choices[0].text == "Hello, world!"
    assert (await routed.openai.responses.create(model=MODEL, input="hi")).output_text == "Hello, world!"
    kinds = [event.type async for event in await routed.openai.responses.create(model=MODEL, input="hi", stream=True)]
    assert (kinds[0], kinds[-1]) == ("response.created", "response.completed")


@pytest.fixture
def calling(both):
    for served in both[:2]:
        served.engine.replies = [CALL]
    yield both[2]
    for served in both[:2]:
        served.engine.reset()


async def test_tool_calls_arrive_whole_and_streamed(calling):
    (choice,) = (await chat(calling, tools=[WEATHER])).choices
    (call,) = choice.message.tool_calls
    assert (choice.finish_reason, call.function.name) == ("tool_calls", "weather")
    assert json.loads(call.function.arguments) == {"city": "Rome"}
    parts = [
        chunk.choices[0].delta.tool_calls or [] async for chunk in await chat(calling, tools=[WEATHER], stream=True)
    ]
    text = "".join(part.function.arguments or "" for (part,) in filter(None, parts))
    assert json.loads(text) == {"city": "Rome"}


async def test_models_are_listed(both):
    assert [model.id async for model in both[2].openai.models.list()] == [MODEL]
    assert (await both[2].openai.models.retrieve(MODEL)).id == MODEL


async def test_errors_have_the_client_librarys_types(both):
    with pytest.raises(openai.NotFoundError):
        await chat(both[2], model="other")
    with pytest.raises(openai.BadRequestError, match="temperature"):
        await chat(both[2], temperature=-1)
    with pytest.raises(openai.NotFoundError, match="resp_1"):
        await both[2].openai.responses.retrieve("resp_1")


async def test_a_stream_has_the_bytes_that_the_replica_sent(both):
    """Both requests have the same id, as ids in the body depend on it."""
    first, second, routed = both
    body = {"model": MODEL, "messages": HELLO, "stream": True, "n": 2}
    headers = {"x-request-id": "same"}
    through = await routed.http.post("/v1/chat/completions", json=body, headers=headers)
    for served in (first, second):
        if served.url.endswith(through.headers["x-octavo-replica"]):
            direct = await served.http.post("/v1/chat/completions", json=body, headers=headers)
    assert without_time(through) == without_time(direct)


def without_time(answer: httpx.Response) -> bytes:
    parts = answer.content.split(b'"created":')
    return b"".join([parts[0], *(part[10:] for part in parts[1:])])


async def test_tokenize_and_render_are_routed_by_model(both):
    routed = both[2]
    assert (await routed.http.post("/tokenize", json={"model": MODEL, "prompt": "hi"})).json()["count"] == 2
    tokens = {"model": MODEL, "tokens": [104, 105]}
    assert (await routed.http.post("/detokenize", json=tokens)).json()["prompt"] == "hi"
    rendered = await routed.http.post("/v1/chat/completions/render", json={"model": MODEL, "messages": HELLO})
    assert rendered.status_code == 200


async def test_an_engine_failure_in_mid_stream_raises_in_the_client(both):
    first, second, routed = both
    for served in (first, second):
        served.engine.fail_at = 3
    try:
        with pytest.raises(openai.APIError, match="scripted"):
            async for _ in await chat(routed, stream=True):
                pass
    finally:
        for served in (first, second):
            served.engine.reset()
