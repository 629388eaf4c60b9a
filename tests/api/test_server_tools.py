"""Tool calls through the whole server: text of the model becomes calls, streamed or not, however it is split."""

import json

import pytest
import pytest_asyncio
from octavo_server.output_parsing.tool_use import ToolSettings
from octavo_testing.grammars import accepts
from octavo_testing.scripted import write_byte_model
from octavo_testing.server import MODEL, ScriptedClient, events, serving
from openai import BadRequestError

pytestmark = pytest.mark.asyncio(loop_scope="module")

HELLO = [{"role": "user", "content": "hi"}]
TEMPLATE = (
    "{% if tools %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls %}<call>{{ call.function.name }}"
    "{% for key, value in call.function.arguments.items() %} {{ key }}={{ value }}{% endfor %}</call>{% endfor %}"
    "{% if m.tool_call_id %} for {{ m.tool_call_id }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        "strict": True,
    },
}
NOW = {"type": "function", "function": {"name": "now", "strict": True}}
TOOLS = [WEATHER, NOW]

ANSWERS = {
    "hermes": 'Sure.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Kraków"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    "llama3_json": '{"name": "weather", "parameters": {"city": "Kraków"}}; {"name": "now", "parameters": {}}',
    "mistral": 'Sure.[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Kraków"}}, '
    '{"name": "now", "arguments": {}}]',
    "pythonic": '[weather(city="Kraków"), now()]',
    "qwen3_coder": "Sure.\n<tool_call>\n<function=weather>\n<parameter=city>\nKraków\n</parameter>\n</function>\n"
    "</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
}


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=ANSWERS)
async def server(request, tmp_path_factory):
    engine = ScriptedClient(write_byte_model(tmp_path_factory.mktemp("model")), chat_template=TEMPLATE)
    async with serving(
        engine, tools=ToolSettings(tool_call_parser=request.param, enable_auto_tool_choice=True)
    ) as started:
        started.format = request.param
        yield started


@pytest.fixture
def served(server):
    server.engine.reset()
    server.engine.replies = [ANSWERS[server.format]]
    return server


async def chat(served, **fields):
    return await served.openai.chat.completions.create(**{"model": MODEL, "messages": HELLO, "tools": TOOLS, **fields})


async def streamed(served, **fields):
    async with served.openai.chat.completions.stream(
        **{"model": MODEL, "messages": HELLO, "tools": TOOLS, **fields}
    ) as stream:
        return await stream.get_final_completion()


def calls_of(message):
    return [(call.type, call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls]


BOTH = [("function", "weather", {"city": "Kraków"}), ("function", "now", {})]


async def test_plain_response_has_the_calls(served):
    (choice,) = (await chat(served)).choices
    assert choice.finish_reason == "tool_calls"
    assert calls_of(choice.message) == BOTH
    assert choice.message.content in (None, "Sure.")
    assert len({call.id for call in choice.message.tool_calls}) == 2


async def test_stream_has_the_same_calls(served):
    (plain,) = (await chat(served)).choices
    (choice,) = (await streamed(served)).choices
    assert choice.finish_reason == "tool_calls"
    assert calls_of(choice.message) == calls_of(plain.message) == BOTH
    assert (choice.message.content or None) == plain.message.content


async def joined(served, **fields):
    """Content, arguments of the calls and finish reason of a stream, from its raw bytes."""
    body = {"messages": HELLO, "tools": TOOLS, "stream": True, **fields}
    answer = await served.http.post("/v1/chat/completions", json=body)
    text, arguments, reason = "", [], None
    for event in events(answer.text)[:-1]:
        (choice,) = json.loads(event)["choices"]
        text += choice["delta"].get("content", "")
        for call in choice["delta"].get("tool_calls", ()):
            arguments += [""] if "id" in call else []
            arguments[call["index"]] += call["function"]["arguments"]
        reason = choice["finish_reason"]
    return text or None, arguments, reason


def of_plain(choice):
    arguments = [call.function.arguments for call in choice.message.tool_calls or []]
    return choice.message.content or None, arguments, choice.finish_reason


async def test_stream_gives_the_same_calls_for_every_split(served):
    """Splits fall within characters, too, as each byte is a token."""
    (plain,) = (await chat(served)).choices
    for num_first in range(len(served.engine.replies[0].encode()) + 1):
        served.engine.yield_at = frozenset({num_first})
        assert await joined(served) == of_plain(plain), num_first


async def test_truncated_answer_is_the_same_in_a_stream(served):
    for max_tokens in range(1, len(served.engine.replies[0].encode()), 4):
        (plain,) = (await chat(served, max_tokens=max_tokens)).choices
        assert plain.finish_reason == "length"
        assert await joined(served, max_tokens=max_tokens) == of_plain(plain)


async def test_answer_without_calls_has_only_text(served):
    served.engine.replies = ["Hello. \n"]
    (choice,) = (await chat(served)).choices
    assert (choice.finish_reason, choice.message.content, choice.message.tool_calls) == ("stop", "Hello. \n", None)
    (choice,) = (await streamed(served)).choices
    assert (choice.finish_reason, choice.message.content, choice.message.tool_calls) == ("stop", "Hello. \n", None)


async def test_template_gets_the_tools(served):
    await chat(served)
    (request,) = served.engine.requests
    prompt = served.engine.frontend.tokenizer.decode(request.prompt_token_ids, skip_special_tokens=False)
    assert prompt.startswith(f"<|im_start|>tools\n{json.dumps(TOOLS)}<|im_end|>\n<|im_start|>user\nhi")


async def test_each_choice_has_its_own_calls(served):
    served.engine.replies = [served.engine.replies[0], "No."]
    one, two = (await chat(served, n=2)).choices
    assert calls_of(one.message) == BOTH
    assert (two.message.content, two.message.tool_calls, two.finish_reason) == ("No.", None, "stop")


async def test_parallel_tool_calls_false_allows_one_call(served):
    (choice,) = (await chat(served, parallel_tool_calls=False)).choices
    assert calls_of(choice.message) == BOTH[:1]


SCHEMA = {"type": "object", "properties": {"degrees": {"type": "integer"}}, "required": ["degrees"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "w", "schema": SCHEMA}}


@pytest.mark.parametrize("create", [chat, streamed])
async def test_a_format_beside_tools_gives_json_or_calls(served, create):
    """A parser without a grammar of its calls gets the format alone."""
    served.engine.replies = ['{"degrees": 3}']
    (choice,) = (await create(served, response_format=FORMAT)).choices
    assert (choice.message.content, choice.finish_reason) == ('{"degrees": 3}', "stop")
    assert not choice.message.tool_calls
    served.engine.replies = [ANSWERS[served.format].removeprefix("Sure.").lstrip()]
    (choice,) = (await create(served, response_format=FORMAT)).choices
    if served.format in ("pythonic", "qwen3_coder"):
        assert choice.message.content == served.engine.replies[0]
    else:
        assert (calls_of(choice.message), choice.finish_reason) == (BOTH, "tool_calls")
        assert accepts(served.engine.requests[-1].params.structured_outputs, served.engine.replies[0])


async def test_tool_choice_none_gives_text(served):
    (choice,) = (await chat(served, tool_choice="none")).choices
    assert (choice.finish_reason, choice.message.content) == ("stop", served.engine.replies[0])


async def test_named_tool_must_exist(served):
    with pytest.raises(BadRequestError) as caught:
        await chat(served, tool_choice={"type": "function", "function": {"name": "other"}})
    assert caught.value.param == "tool_choice"
