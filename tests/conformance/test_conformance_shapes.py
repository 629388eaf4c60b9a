"""Structured output, tool calls, reasoning and the responses API, with the client's own helpers."""

import json

import pytest
from jsonschema import validate
from octavo_server.output_parsing.tool_use import ToolSettings
from octavo_testing.conformance import conforms
from octavo_testing.scripted import write_byte_model
from octavo_testing.server import MODEL, ScriptedClient, serving
from octavo_testing.target import REAL_MODEL
from openai import BadRequestError, pydantic_function_tool
from pydantic import BaseModel, Field

pytestmark = pytest.mark.slow

HELLO = [{"role": "user", "content": "hi"}]
CHAT = "POST /v1/chat/completions"
CALL = 'So: <tool_call>\n{"name": "Weather", "arguments": {"city": "Kraków"}}\n</tool_call>'
THOUGHT = "<think>\nWell.\n</think>\n\n"


class Weather(BaseModel):
    """The weather in a city."""

    city: str = Field(max_length=20)


class Answer(BaseModel):
    sure: bool
    digits: list[int] = Field(min_length=1, max_length=3)


TOOL = pydantic_function_tool(Weather)
TOOL_SCHEMA = TOOL["function"]["parameters"]


@pytest.fixture
async def scripted(tmp_path):
    engine = ScriptedClient(write_byte_model(tmp_path))
    tools = ToolSettings(tool_call_parser="hermes", enable_auto_tool_choice=True)
    settings = {"enable_force_include_usage": True, "enable_per_request_metrics": True}
    async with serving(engine, tools=tools, reasoning_parser="deepseek_r1", **settings) as served:
        yield served


@pytest.mark.real_model
@conforms(CHAT, "`parse()` returns an instance of the given pydantic model", how="openai")
def test_openai_client_parses_a_model(real):
    answer = real.openai.chat.completions.parse(
        model=REAL_MODEL, messages=HELLO, response_format=Answer, max_tokens=80, temperature=0
    )
    assert isinstance(answer.choices[0].message.parsed, Answer)


@conforms(CHAT, "`response_format` json_object and json_schema, streamed or not", how="openai")
def test_response_format_is_enforced(tiny):
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    asked = {
        "model": "tiny",
        "messages": HELLO,
        "temperature": 0,
        "max_tokens": 60,
        "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}},
    }
    whole = tiny.openai.chat.completions.create(**asked).choices[0]
    validate(json.loads(whole.message.content), schema)
    streamed = tiny.openai.chat.completions.create(**asked, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed) == whole.message.content
    asked["response_format"] = {"type": "json_object"}
    assert tiny.openai.chat.completions.create(**asked).choices[0].message.content.lstrip().startswith("{")


@conforms(
    "POST /v1/completions",
    "`structured_outputs` and the older `guided_*` restrict the output",
    how="openai",
)
@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"structured_outputs": {"regex": "ab{3}c"}}, "abbbc"),
        ({"structured_outputs": {"choice": ["only this"]}}, "only this"),
        ({"structured_outputs": {"grammar": 'root ::= "x" "y"'}}, "xy"),
        ({"structured_outputs": {"json": {"const": 7}}}, "7"),
        ({"guided_regex": "ab{3}c"}, "abbbc"),
        ({"guided_choice": ["only this"]}, "only this"),
        ({"guided_json": {"const": 7}}, "7"),
    ],
)
def test_structured_outputs_are_enforced(tiny, fields, text):
    answer = tiny.openai.completions.create(model="tiny", prompt="a", max_tokens=30, extra_body=fields)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (text, "stop")


@conforms(CHAT, "A schema keyword that can't be enforced gets a 400 that names it", how="openai")
def test_unenforceable_keywords_are_rejected(tiny):
    wrong = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "array", "uniqueItems": True}}}
    with pytest.raises(BadRequestError, match="uniqueItems"):
        tiny.openai.chat.completions.create(model="tiny", messages=HELLO, response_format=wrong)


@pytest.mark.real_model
@conforms(19, "`finish_reason` is tool_calls for a required tool, stop for a named one", how="openai")
@pytest.mark.parametrize(
    ("choice", "reason"),
    [("required", "tool_calls"), ({"type": "function", "function": {"name": "Weather"}}, "stop")],
)
def test_chosen_tools_are_called(real, choice, reason):
    answer = real.openai.chat.completions.create(
        model=REAL_MODEL, messages=HELLO, tools=[TOOL], tool_choice=choice, parallel_tool_calls=False, max_tokens=80,
        temperature=0,
    ).choices[0]  # fmt: skip
    (call,) = answer.message.tool_calls
    assert (answer.finish_reason, call.function.name) == (reason, "Weather")
    Weather.model_validate_json(call.function.arguments)


@conforms(
    19,
    "With `tool_choice: auto`, calls are parsed from the text and `finish_reason` is tool_calls",
    how="openai",
)
async def test_automatic_tool_calls_are_parsed(scripted):
    scripted.engine.replies = [THOUGHT + CALL]
    create = scripted.openai.chat.completions.create
    choice = (await create(model=MODEL, messages=HELLO, tools=[TOOL])).choices[0]
    assert (choice.finish_reason, choice.message.content.strip()) == ("tool_calls", "So:")
    assert json.loads(choice.message.tool_calls[0].function.arguments) == {"city": "Kraków"}
    unused = (await create(model=MODEL, messages=HELLO, tools=[TOOL], tool_choice="none")).choices[0]
    assert (unused.finish_reason, unused.message.tool_calls) == ("stop", None)


@conforms(19, "Tools beside a `response_format`: the answer is calls, or JSON of the schema", how="openai, scripted")
@pytest.mark.parametrize("reply", ['{"city": "Oslo"}', CALL.removeprefix("So: ")])
async def test_tools_beside_a_format_give_calls_or_json(tmp_path, reply):
    engine = ScriptedClient(write_byte_model(tmp_path))
    engine.replies = [reply]
    asked = {"model": MODEL, "messages": HELLO, "tools": [TOOL]}
    asked["response_format"] = {"type": "json_schema", "json_schema": {"name": "w", "schema": TOOL_SCHEMA}}
    async with serving(engine, tools=ToolSettings(tool_call_parser="hermes", enable_auto_tool_choice=True)) as served:
        message = (await served.openai.chat.completions.create(**asked)).choices[0].message
    if reply.startswith("{"):
        assert (json.loads(message.content), message.tool_calls) == ({"city": "Oslo"}, None)
    else:
        assert json.loads(message.tool_calls[0].function.arguments) == {"city": "Kraków"}


@conforms(CHAT, "The client's helper joins streamed tool calls", how="openai")
async def test_tool_calls_are_streamed(scripted):
    scripted.engine.replies = [THOUGHT + CALL]
    async with scripted.openai.chat.completions.stream(model=MODEL, messages=HELLO, tools=[TOOL]) as stream:
        final = await stream.get_final_completion()
    (call,) = final.choices[0].message.tool_calls
    assert call.function.parsed_arguments == Weather(city="Kraków")
    assert (final.choices[0].finish_reason, json.loads(call.function.arguments)) == ("tool_calls", {"city": "Kraków"})


@conforms(CHAT, "Reasoning is in `reasoning` and, under its old name, `reasoning_content`", how="openai")
async def test_reasoning_is_separated(scripted):
    scripted.engine.replies = [THOUGHT + "Done."]
    message = (await scripted.openai.chat.completions.create(model=MODEL, messages=HELLO)).choices[0].message
    assert (message.content.strip(), message.reasoning.strip(), message.reasoning_content.strip()) == (
        "Done.",
        "Well.",
        "Well.",
    )


@conforms(15, "`--enable-force-include-usage` adds usage to every chunk of every stream", how="openai")
async def test_usage_is_forced_by_the_flag(scripted):
    stream = await scripted.openai.chat.completions.create(model=MODEL, messages=HELLO, stream=True)
    assert all([chunk.usage.total_tokens > 0 async for chunk in stream])


@conforms(23, "`--enable-per-request-metrics` adds a request's times under vLLM's names", how="openai")
async def test_request_metrics_are_returned(scripted):
    answer = await scripted.openai.chat.completions.create(model=MODEL, messages=HELLO)
    assert {
        *("time_to_first_token_ms", "generation_time_ms", "queue_time_ms", "mean_itl_ms", "tokens_per_second"),
    } <= set(answer.metrics)


@conforms("POST /v1/responses", "Function calls are items of the output", how="openai")
async def test_responses_api_calls_tools(scripted):
    scripted.engine.replies = [THOUGHT + CALL]
    tool = {"type": "function", "name": "Weather", "parameters": Weather.model_json_schema(), "strict": True}
    answer = await scripted.openai.responses.create(model=MODEL, input="hi", tools=[tool])
    (call,) = [item for item in answer.output if item.type == "function_call"]
    assert (call.name, json.loads(call.arguments)) == ("Weather", {"city": "Kraków"})


@pytest.mark.real_model
@conforms("POST /v1/responses", "`parse()` returns an instance of the given pydantic model", how="openai")
def test_responses_api_parses_a_model(real):
    answer = real.openai.responses.parse(
        model=REAL_MODEL, input="hi", text_format=Answer, max_output_tokens=80, temperature=0
    )
    assert isinstance(answer.output_parsed, Answer)
