"""`tools`, `tool_choice` and related fields of a request: forced calls, and errors that name the field."""

import json

import pytest
import pytest_asyncio
from octavo_server.output_parsing.tool_use import AUTO_IS_OFF, ToolSettings
from octavo_testing.grammars import accepts
from octavo_testing.scripted import write_byte_model
from octavo_testing.server import ScriptedClient, events, serving

pytestmark = pytest.mark.asyncio(loop_scope="module")

HELLO = [{"role": "user", "content": "hi"}]
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": CITY}}
NOW = {"type": "function", "function": {"name": "now"}}
NAMED = {"type": "function", "function": {"name": "weather"}}
REQUIRED = '[{"name": "weather", "parameters": {"city": "Kraków"}}, {"name": "now", "parameters": {}}]'


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tmp_path_factory):
    async with serving(ScriptedClient(write_byte_model(tmp_path_factory.mktemp("model")))) as started:
        yield started


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mistral_server(tmp_path_factory):
    """A server whose call markers are special tokens."""
    folder = write_byte_model(tmp_path_factory.mktemp("mistral"), more_special_tokens=("[TOOL_CALLS]", "[ARGS]"))
    settings = ToolSettings(tool_call_parser="mistral", enable_auto_tool_choice=True)
    async with serving(ScriptedClient(folder), tools=settings) as started:
        yield started


@pytest.fixture
def served(server):
    server.engine.reset()
    return server


@pytest.fixture
def mistral(mistral_server):
    mistral_server.engine.reset()
    text = 'Sure.<|im_start|>[TOOL_CALLS]weather[ARGS]{"city": "Kraków"}'
    mistral_server.engine.replies = [mistral_server.engine.frontend.tokenizer.encode(text, add_special_tokens=False)]
    return mistral_server


def schema_format(schema):
    return {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}


async def ask(served, **fields):
    body = {"messages": HELLO, "tools": [WEATHER, NOW], **fields}
    answer = await served.http.post("/v1/chat/completions", json={k: v for k, v in body.items() if v is not None})
    return answer.status_code, answer.json()


async def choice_of(served, **fields):
    status, body = await ask(served, **fields)
    assert status == 200, body
    return body["choices"][0]


async def deltas(served, **fields):
    body = {"messages": HELLO, "tools": [WEATHER, NOW], "stream": True, **fields}
    answer = await served.http.post("/v1/chat/completions", json=body)
    return [json.loads(event)["choices"][0] for event in events(answer.text)[:-1]]


async def test_required_tool_choice_gives_calls(served):
    served.engine.replies = [REQUIRED]
    choice = await choice_of(served, tool_choice="required")
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    calls = [
        (c["type"], c["function"]["name"], json.loads(c["function"]["arguments"]))
        for c in choice["message"]["tool_calls"]
    ]
    assert calls == [("function", "weather", {"city": "Kraków"}), ("function", "now", {})]
    shape = served.engine.requests[0].params.structured_outputs
    assert accepts(shape, REQUIRED)
    assert not accepts(shape, "[]")


async def test_required_tool_choice_gives_one_call_without_parallel_calls(served):
    served.engine.replies = ['[{"name": "now", "parameters": {}}]']
    await choice_of(served, tool_choice="required", parallel_tool_calls=False)
    shape = served.engine.requests[0].params.structured_outputs
    assert accepts(shape, served.engine.replies[0])
    assert not accepts(shape, REQUIRED)


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
async def test_a_forced_call_wins_over_a_format(served, choice):
    """The format would be refused if it were read."""
    served.engine.replies = [REQUIRED if choice == "required" else '{"city": "Oslo"}']
    answer = await choice_of(served, tool_choice=choice, response_format=schema_format({"uniqueItems": True}))
    assert answer["message"]["tool_calls"][0]["function"]["name"] == "weather"


async def test_named_call_has_finish_reason_stop(served):
    served.engine.replies = ['{"city": "Kraków"}']
    choice = await choice_of(served, tool_choice=NAMED)
    (call,) = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": '{"city": "Kraków"}'}
    assert choice["finish_reason"] == "stop"
    schema = served.engine.requests[0].params.structured_outputs.json
    assert schema == {**CITY, "additionalProperties": False}


async def test_truncated_call_has_finish_reason_length(served):
    served.engine.replies = ['{"city": "Kraków"}']
    choice = await choice_of(served, tool_choice=NAMED, max_tokens=8)
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"city":'


async def test_without_a_parser_the_format_stands_alone(served):
    served.engine.replies = ['{"a": 1}']
    answer = await choice_of(served, response_format=schema_format({"type": "object"}))
    assert (answer["message"]["content"], answer["finish_reason"]) == ('{"a": 1}', "stop")
    assert accepts(served.engine.requests[0].params.structured_outputs, '{"a": 1}')


async def test_special_tokens_begin_calls_beside_a_format(mistral):
    """The grammar allows calls only by the special token, and JSON."""
    mistral.engine.replies = [
        mistral.engine.frontend.tokenizer.encode("[TOOL_CALLS]now[ARGS]{}", add_special_tokens=False)
    ]
    answer = await choice_of(mistral, response_format=schema_format({"type": "object"}))
    assert answer["message"]["tool_calls"][0]["function"] == {"name": "now", "arguments": "{}"}
    token = mistral.engine.frontend.tokenizer.token_id("[TOOL_CALLS]")
    assert f"<[{token}]>" in json.loads(mistral.engine.requests[0].grammar)["grammars"][0]["lark_grammar"]


@pytest.mark.parametrize(
    ("fields", "reply", "first_piece"),
    [({"tool_choice": "required"}, REQUIRED, "{"), ({"tool_choice": NAMED}, '{"city": "Kraków"}', '{"')],
)
async def test_arguments_are_streamed_as_they_are_generated(served, fields, reply, first_piece):
    served.engine.replies = [reply]
    got = [d for d in await deltas(served, **fields) if d["delta"].get("tool_calls")]
    first, *rest = [call for d in got for call in d["delta"]["tool_calls"]]
    assert set(first) == {"index", "id", "type", "function"}
    assert first["function"] == {"name": "weather", "arguments": ""}
    pieces = [call["function"]["arguments"] for call in rest if call["index"] == 0]
    assert "".join(pieces) == '{"city": "Kraków"}'
    assert pieces == [first_piece, *'{"city": "Kraków"}'[len(first_piece) :]]
    assert all(set(call) == {"index", "function"} for call in rest if call["function"]["arguments"])


async def test_special_tokens_around_calls_are_parsed_and_not_shown(mistral):
    choice = await choice_of(mistral)
    assert choice["message"]["content"] == "Sure."
    (call,) = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": '{"city": "Kraków"}'}
    assert len(call["id"]) == 9
    text = "".join(d["delta"].get("content", "") for d in await deltas(mistral))
    assert text == "Sure."


async def test_special_tokens_are_skipped_in_text(mistral):
    choice = await choice_of(mistral, tools=None)
    assert choice["message"]["content"] == 'Sure.weather{"city": "Kraków"}'


async def test_logprobs_cover_every_token_of_a_call(served):
    served.engine.replies = ['{"city": "Oslo"}']
    choice = await choice_of(served, tool_choice=NAMED, logprobs=True, top_logprobs=1)
    assert "".join(t["token"] for t in choice["logprobs"]["content"][:-1]) == '{"city": "Oslo"}'
    got = await deltas(served, tool_choice=NAMED, logprobs=True, top_logprobs=1)
    tokens = [t["token"] for d in got if d["logprobs"] for t in d["logprobs"]["content"]]
    assert "".join(tokens[:-1]) == '{"city": "Oslo"}'


async def test_a_stop_string_ends_a_call(served):
    served.engine.replies = ['{"city": "Oslo"}']
    choice = await choice_of(served, tool_choice=NAMED, stop="lo")
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "lo")
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"city": "Os'


async def test_fields_without_an_effect_are_accepted(served):
    ignored = {"store": True, "metadata": {"a": "b"}, "user": "u", "service_tier": "auto", "prompt_cache_key": "k"}
    assert (await choice_of(served, tool_choice="none", **ignored))["message"]["content"] == "Hello, world!"
    assert (await choice_of(served, tools=None, tool_choice="none"))["finish_reason"] == "stop"
    assert (await choice_of(served, tools=[], tool_choice="auto"))["finish_reason"] == "stop"
    assert (await choice_of(served, tools=None, parallel_tool_calls=True))["finish_reason"] == "stop"


async def test_results_of_calls_reach_the_template(served):
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    turns = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "cold"}]},
    ]
    assert (await choice_of(served, tools=None, messages=[*HELLO, *turns]))["finish_reason"] == "stop"
    prompt = served.engine.frontend.tokenizer.decode(served.engine.requests[0].prompt_token_ids)
    assert prompt == "user\nhi\nassistant\n\ntool\ncold\nassistant\n"


async def test_tokenize_accepts_tools(served):
    answer = await served.http.post("/tokenize", json={"messages": HELLO, "tools": [NOW]})
    assert answer.status_code == 200


def tool(**function):
    return [{"type": "function", "function": function}]


UNIQUE = tool(name="u", parameters={"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}})


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({}, "tool_choice", AUTO_IS_OFF),
        ({"tool_choice": "auto"}, "tool_choice", AUTO_IS_OFF),
        ({"tools": None, "tool_choice": "required"}, "tool_choice", "`tools` must be set"),
        ({"tools": [], "tool_choice": NAMED}, "tool_choice", "`tools` must be set"),
        ({"tool_choice": "maybe"}, "tool_choice", "'none', 'auto' or 'required'"),
        ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice", "weather, now"),
        ({"tool_choice": {"type": "function"}}, "tool_choice", "tool_choice.function: Field"),
        ({"tool_choice": "required", "tools": [NOW, NOW]}, "tools", "'now'"),
        ({"tool_choice": "required", "tools": tool(name="a b")}, "tools[0].function.name", "'a b'"),
        ({"tool_choice": "required", "tools": tool(name="")}, "tools[0].function.name", "1 to 128"),
        ({"tool_choice": "none", "tools": tool(name="x" * 129)}, "tools[0].function.name", "1 to 128"),
        ({"tools": tool(description="no name")}, "tools[0].function.name", "required"),
        ({"tools": tool(name="f", parameters="x")}, "tools[0].function.parameters", "an object"),
        ({"tools": tool(name="f", parameters={"type": "string"})}, "tools[0].function.parameters", '"object"'),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "'function'"),
        ({"tool_choice": "required", "tools": [NOW, *UNIQUE]}, "tools[1].function.parameters", "a/uniqueItems"),
        ({"tool_choice": NAMED, "tools": [WEATHER, *UNIQUE], "n": 0}, "n", "1"),
        ({"functions": [{"name": "f"}]}, "functions", "replaced by tools"),
        ({"function_call": "auto"}, "function_call", "replaced by tool_choice"),
    ],
)  # fmt: skip
async def test_error_names_the_field(served, fields, param, says):
    status, body = await ask(served, **fields)
    assert (status, body["error"]["param"]) == (400, param)
    assert says in body["error"]["message"]
