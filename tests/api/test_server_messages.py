"""`/v1/messages` through Anthropic's client: text, blocks, tools, thinking, stream events, token counts and errors."""

import json

import anthropic
import pytest
import pytest_asyncio
from octavo_engine.wire.hashing import tenant_salt
from octavo_server.output_parsing.tool_use import ToolSettings
from octavo_testing.grammars import accepts
from octavo_testing.scripted import write_byte_model
from octavo_testing.server import MODEL, ScriptedClient, serving

pytestmark = pytest.mark.asyncio(loop_scope="module")

TEMPLATE = (
    "{% if tools %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}{{ m.content }}"
    "{% for call in m.tool_calls %}<call>{{ call.id }} {{ call.function.name }}"
    "{% for key, value in call.function.arguments.items() %} {{ key }}={{ value }}{% endfor %}</call>{% endfor %}"
    "{% if m.tool_call_id %} for {{ m.tool_call_id }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WEATHER = {
    "name": "weather",
    "description": "of a city",
    "input_schema": {"properties": {"city": {"type": "string"}}, "required": ["city"]},
}
NOW = {"name": "now", "type": "custom", "input_schema": {"type": "object"}}
CALLS = (
    'Sure.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Kraków"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
)
THOUGHT = "<think>\nHm, the weather.\n</think>\n\n"
USER = {"role": "user", "content": "hi"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tmp_path_factory):
    folder = write_byte_model(tmp_path_factory.mktemp("model"))
    engine = ScriptedClient(folder, chat_template=TEMPLATE, max_model_len=1024)
    tools = ToolSettings(tool_call_parser="hermes", enable_auto_tool_choice=True)
    async with serving(engine, tools=tools, reasoning_parser="qwen3") as started:
        yield started


@pytest.fixture
def served(server):
    server.engine.reset()
    return server


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(server):
    async with anthropic.AsyncAnthropic(base_url=server.url, api_key="none", max_retries=0) as found:
        yield found


async def answer_of(client, **fields):
    return await client.messages.create(**{"model": MODEL, "max_tokens": 200, "messages": [USER], **fields})


async def raw_events(served, **fields):
    body = {"max_tokens": 200, "messages": [USER], "stream": True, **fields}
    answer = await served.http.post("/v1/messages", json=body)
    assert (answer.status_code, answer.headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
    *frames, rest = answer.text.split("\n\n")
    assert rest == ""
    events = []
    for frame in frames:
        name, data = frame.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def prompt_of(served):
    return served.engine.prompt_text()


async def test_plain_message_has_all_fields(served, client):
    served.engine.num_cached_tokens = 2
    answer = await answer_of(client, system="Be kind.", metadata={"user_id": "me"})
    assert [(block.type, block.text) for block in answer.content] == [("text", "Hello, world!")]
    assert (answer.type, answer.role, answer.model) == ("message", "assistant", MODEL)
    assert (answer.stop_reason, answer.stop_sequence) == ("end_turn", None)
    assert answer.id.startswith("msg_")
    usage = answer.usage
    assert usage.input_tokens + usage.cache_read_input_tokens == len(served.engine.requests[0].prompt_token_ids)
    assert (usage.cache_read_input_tokens, usage.cache_creation_input_tokens, usage.output_tokens) == (2, 0, 14)
    assert (
        prompt_of(served)
        == "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )


async def test_text_stream_has_all_events_in_order(served):
    served.engine.num_cached_tokens = 2
    events = await raw_events(served)
    kinds = [event["type"] for event in events]
    num_deltas = kinds.count("content_block_delta")
    assert kinds == [
        *("message_start", "ping", "content_block_start"),
        *["content_block_delta"] * num_deltas,
        *("content_block_stop", "message_delta", "message_stop"),
    ]
    message = events[0]["message"]
    assert (message["content"], message["stop_reason"], message["usage"]["output_tokens"]) == ([], None, 0)
    assert message["usage"]["cache_read_input_tokens"] == 2
    assert events[2] == {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    assert {delta["type"] for delta in deltas} == {"text_delta"}
    assert "".join(delta["text"] for delta in deltas) == "Hello, world!"
    assert events[-2]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert events[-2]["usage"]["output_tokens"] == 14


async def test_the_client_reads_a_stream(served, client):
    async with client.messages.stream(model=MODEL, max_tokens=50, messages=[USER]) as stream:
        texts = [text async for text in stream.text_stream]
        final = await stream.get_final_message()
    assert "".join(texts) == final.content[0].text == "Hello, world!"
    assert (final.stop_reason, final.usage.output_tokens) == ("end_turn", 14)


STOPS = {
    "token limit": ({"max_tokens": 5}, "Hello", "max_tokens", None),
    "stop sequence": ({"stop_sequences": ["wor", "x"]}, "Hello, ", "stop_sequence", "wor"),
    "end": ({}, "Hello, world!", "end_turn", None),
}


@pytest.mark.parametrize(("fields", "text", "reason", "sequence"), STOPS.values(), ids=STOPS.keys())
async def test_stop_reasons_are_anthropics(served, client, fields, text, reason, sequence):
    answer = await answer_of(client, **fields)
    assert (answer.content[0].text, answer.stop_reason, answer.stop_sequence) == (text, reason, sequence)
    events = await raw_events(served, **fields)
    assert events[-2]["delta"] == {"stop_reason": reason, "stop_sequence": sequence}


async def test_blocks_become_chat_messages(served, client):
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "Where"}, {"type": "text", "text": "and when?"}]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "ask", "signature": "s"},
            {"type": "redacted_thinking", "data": "x"},
            {"type": "text", "text": "Sure."},
            {"type": "tool_use", "id": "c1", "name": "weather", "input": {"city": "Kraków"}},
            {"type": "tool_use", "id": "c2", "name": "now", "input": {}},
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "c1", "content": "rain"},
            {"type": "tool_result", "tool_use_id": "c2", "is_error": False,
             "content": [{"type": "text", "text": "no"}, {"type": "text", "text": "on"}]},
            {"type": "text", "text": "And?"},
        ]},
        {"role": "assistant", "content": "At noon."},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c3"}]},
    ]  # fmt: skip
    system = [
        {"type": "text", "text": "x-anthropic-billing-header: 17"},
        {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": " Please."},
    ]
    await answer_of(client, messages=messages, system=system)
    assert prompt_of(served).replace("<|im_start|>", "").split("<|im_end|>\n") == [
        "system\nBe brief. Please.",
        "user\nWhere\nand when?",
        "assistant\n(ask)Sure.<call>c1 weather city=Kraków</call><call>c2 now</call>",
        "tool\nrain for c1",
        "tool\nno\non for c2",
        "user\nAnd?",
        "assistant\nAt noon.",
        "tool\n for c3",
        "assistant\n",
    ]


async def test_a_last_message_of_the_assistant_is_continued(served, client):
    await answer_of(client, messages=[USER, {"role": "assistant", "content": "Once upon"}])
    assert prompt_of(served) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nOnce upon"


async def test_calls_become_blocks_and_their_results_the_next_request(served, client):
    served.engine.replies = [CALLS]
    first = await answer_of(client, tools=[WEATHER, NOW])
    text, weather, now = first.content
    assert (text.type, text.text.strip(), first.stop_reason) == ("text", "Sure.", "tool_use")
    assert (weather.type, weather.name, weather.input) == ("tool_use", "weather", {"city": "Kraków"})
    assert (now.name, now.input) == ("now", {})
    assert '"required": ["city"]' in prompt_of(served)
    results = [{"type": "tool_result", "tool_use_id": call.id, "content": "ok"} for call in (weather, now)]
    served.engine.replies = ["Done."]
    turns = [USER, {"role": "assistant", "content": first.content}, {"role": "user", "content": results}]
    answer = await answer_of(client, messages=turns, tools=[WEATHER, NOW])
    assert (answer.content[0].text, answer.stop_reason) == ("Done.", "end_turn")
    assert f"<call>{weather.id} weather city=Kraków</call><call>{now.id} now</call>" in prompt_of(served)
    assert f"ok for {now.id}" in prompt_of(served)


@pytest.mark.parametrize("reply", [CALLS, THOUGHT + CALLS, THOUGHT + "It rains.", "\n\n" + CALLS[6:]])
async def test_stream_equals_the_plain_message_for_every_split(served, client, reply):
    served.engine.replies = [reply]
    whole = await answer_of(client, tools=[WEATHER, NOW])
    for cuts in [None, frozenset[int](), *({cut} for cut in range(1, len(reply.encode()), 5))]:
        served.engine.yield_at = cuts
        async with client.messages.stream(model=MODEL, max_tokens=200, messages=[USER], tools=[WEATHER, NOW]) as stream:
            final = await stream.get_final_message()
        assert [_content(block) for block in final.content] == [_content(block) for block in whole.content]
        assert final.stop_reason == whole.stop_reason


def _content(block):
    """A block without its id and signature."""
    return block.type, *(getattr(block, name, None) for name in ("text", "thinking", "name", "input"))


async def test_thinking_is_a_signed_block_of_its_own(served, client):
    served.engine.replies = [THOUGHT + "It rains."]
    thinking, text = (await answer_of(client, thinking={"type": "enabled", "budget_tokens": 1024})).content
    assert (thinking.type, thinking.thinking.strip(), text.text.strip()) == (
        "thinking", "Hm, the weather.", "It rains.",
    )  # fmt: skip
    assert thinking.signature
    kinds = [event["delta"]["type"] for event in await raw_events(served) if event["type"] == "content_block_delta"]
    assert kinds.count("signature_delta") == 1
    assert kinds.index("signature_delta") == kinds.count("thinking_delta")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "is_off"),
    [
        ({"thinking": {"type": "disabled"}}, True),
        ({"output_config": {"effort": "none"}}, True),
        ({"output_config": {"effort": "low"}}, False),
        ({"thinking": {"type": "disabled"}, "chat_template_kwargs": {"enable_thinking": True}}, False),
    ],
)
async def test_thinking_can_be_turned_off(served, client, fields, is_off, stream):
    """Values of `chat_template_kwargs` win."""
    served.engine.replies = [THOUGHT + "It rains."]
    answer = await answer_of(client, extra_body=fields, stream=stream)
    kinds = [e.content_block.type async for e in answer if e.type == "content_block_start"] if stream else None
    assert (kinds or [block.type for block in answer.content]) == (["text"] if is_off else ["thinking", "text"])


async def test_an_unknown_effort_is_a_bad_request(client):
    with pytest.raises(anthropic.BadRequestError, match="effort"):
        await answer_of(client, extra_body={"output_config": {"effort": "bogus"}})


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "now"}], ids=["any", "tool"])
async def test_forced_tool_choice_sets_the_structured_output(served, client, choice):
    served.engine.replies = ['[{"name": "now", "parameters": {}}]' if choice["type"] == "any" else "{}"]
    extra = {"chat_template_kwargs": {"enable_thinking": False}}
    answer = await answer_of(client, tools=[WEATHER, NOW], tool_choice=choice, extra_body=extra)
    assert [(block.type, block.name, block.input) for block in answer.content] == [("tool_use", "now", {})]
    assert answer.stop_reason == "tool_use"
    assert served.engine.requests[0].grammar


FORMAT = {"type": "json_schema", "schema": {"type": "object", "properties": {"c": {"type": "integer"}}}}


@pytest.mark.parametrize("field", [{"output_config": {"format": FORMAT}}, {"output_format": FORMAT}])
async def test_a_format_beside_tools_gives_json_or_calls(served, client, field):
    extra = {"chat_template_kwargs": {"enable_thinking": False}, **field}
    served.engine.replies = ['{"c": 3}']
    (block,) = (await answer_of(client, tools=[WEATHER, NOW], extra_body=extra)).content
    assert (block.type, block.text) == ("text", '{"c": 3}')
    served.engine.replies = [CALLS.removeprefix("Sure.\n")]
    answer = await answer_of(client, tools=[WEATHER, NOW], extra_body=extra)
    assert [(block.type, block.name) for block in answer.content] == [("tool_use", "weather"), ("tool_use", "now")]
    for request in served.engine.requests:
        assert accepts(request.params.structured_outputs, '{"c": 3}')
        assert accepts(request.params.structured_outputs, CALLS.removeprefix("Sure.\n"))


async def test_no_tool_is_called_if_the_choice_is_none(served, client):
    served.engine.replies = [CALLS]
    (block,) = (await answer_of(client, tools=[NOW], tool_choice={"type": "none"})).content
    assert block.type == "text"


async def test_arguments_cut_by_the_token_limit_are_empty(served, client):
    served.engine.replies = [CALLS]
    answer = await answer_of(client, tools=[WEATHER], max_tokens=len(CALLS.partition("Kra")[0]))
    assert answer.stop_reason == "max_tokens"
    assert all(block.input == {} for block in answer.content if block.type == "tool_use")


async def test_fields_reach_the_engine(served, client):
    schema = {"type": "object", "properties": {"city": {"type": "string"}}}
    config = {"format": {"type": "json_schema", "schema": schema}, "effort": "low"}
    extra = {"cache_salt": "mine", "output_config": config, "top_k": 7}
    extra |= {"chat_template_kwargs": {"enable_thinking": False}, "temperature": 0.7, "top_p": 0.9}
    await answer_of(client, max_tokens=9, stop_sequences=["!"], extra_body=extra)
    (request,) = served.engine.requests
    params = request.params
    assert (params.temperature, params.top_p, params.top_k, params.max_tokens) == (0.7, 0.9, 7, 9)
    assert (params.stop, request.cache_salt) == (["!"], tenant_salt("", "mine"))
    assert "city" in request.grammar


async def test_count_tokens_equals_the_prompt(served, client):
    fields = {"messages": [USER], "system": "Be kind.", "tools": [WEATHER]}
    counted = await client.messages.count_tokens(model=MODEL, **fields)
    assert served.engine.requests == []
    await answer_of(client, **fields)
    assert counted.input_tokens == len(served.engine.requests[0].prompt_token_ids)


async def test_failure_in_mid_stream_is_an_error_event(served, client):
    served.engine.fail_at = 3
    events = await raw_events(served)
    assert (events[-1]["type"], events[-1]["error"]["type"]) == ("error", "api_error")
    assert "scripted" in events[-1]["error"]["message"]
    with pytest.raises(anthropic.APIStatusError, match="scripted"):
        async with client.messages.stream(model=MODEL, max_tokens=50, messages=[USER]) as stream:
            await stream.get_final_message()


async def test_failure_before_the_first_token_sets_the_status(served):
    served.engine.fail_at = 0
    for stream in (False, True):
        body = {"max_tokens": 9, "messages": [USER], "stream": stream}
        answer = await served.http.post("/v1/messages", json=body)
        assert (answer.status_code, answer.json()["error"]["type"]) == (500, "api_error")


def _block(block, role="user"):
    return {"messages": [{"role": role, "content": [block]}]}


REFUSED = {
    "no token limit": ({"max_tokens": None}, "max_tokens"),
    "token limit of zero": ({"max_tokens": 0}, "max_tokens"),
    "no messages": ({"messages": []}, "messages"),
    "messages of a wrong type": ({"messages": "hi"}, "messages"),
    "another role": ({"messages": [{"role": "tool", "content": "x"}]}, r"messages\[0\]\.role"),
    "an image": (_block({"type": "image", "source": {"type": "url", "url": "x"}}), r"content\[0\] is of type 'image'"),
    "a document": (_block({"type": "document"}), r"content\[0\] is of type 'document'"),
    "an image in a result": (
        _block({"type": "tool_result", "tool_use_id": "c", "content": [{"type": "image"}]}),
        r"content\[0\]\.content\[0\] is of type 'image'",
    ),
    "a call of the user": (_block({"type": "tool_use"}), r"content\[0\] is of type 'tool_use'"),
    "a call without input": (
        _block({"type": "tool_use", "id": "c", "name": "f"}, "assistant"),
        r"content\[0\]\.input must be an object",
    ),
    "a text without text": (_block({"type": "text"}), r"content\[0\]\.text must be a string"),
    "a block without a type": (_block({"text": "x"}), r"content\[0\] is of type None"),
    "an image in the system prompt": ({"system": [{"type": "image"}]}, r"system\[0\] is of type 'image'"),
    "a tool of Anthropic's": ({"tools": [{"type": "web_search_20250305", "name": "w"}]}, r"tools\[0\] is of type 'web"),
    "a tool without a schema": ({"tools": [{"name": "w"}]}, r"tools\[0\]\.input_schema is missing"),
    "a choice without a name": ({"tools": [NOW], "tool_choice": {"type": "tool"}}, "needs name"),
    "a choice without tools": ({"tool_choice": {"type": "any"}}, "tool_choice"),
    "MCP servers": ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
    "a format without a schema": ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format"),
    "a schema of a tool": (
        {"tools": [NOW, {"name": "u", "input_schema": {"uniqueItems": True}}], "tool_choice": {"type": "any"}},
        r"^Error.*tools\[1\]\.input_schema: .*'uniqueItems'",
    ),
    "a schema of a format": (
        {"output_config": {"format": {"type": "json_schema", "schema": {"not": {}}}}},
        r"output_config\.format\.schema: .*'not'",
    ),
    "a schema of an older format": (
        {"output_format": {"type": "json_schema", "schema": {"not": {}}}, "tools": [NOW]},
        r"output_format\.schema: .*'not'",
    ),
    "temperature": ({"temperature": 3}, "temperature"),
    "stop sequences": ({"stop_sequences": ["x"] * 1000}, "stop_sequences holds 1000 entries"),
    "blocks of the system prompt": ({"system": [{"type": "text", "text": "a"}] * 5000}, "system holds 5000 entries"),
}


@pytest.mark.parametrize(("fields", "message"), REFUSED.values(), ids=REFUSED.keys())
async def test_error_names_an_unsupported_field(served, client, fields, message):
    with pytest.raises(anthropic.BadRequestError, match=message) as refused:
        await client.post("/v1/messages", body={"max_tokens": 5, "messages": [USER], **fields}, cast_to=object)
    assert refused.value.body["type"] == "error"
    assert refused.value.body["error"]["type"] == "invalid_request_error"
    assert served.engine.requests == []


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens", "/v1/messages/render"])
async def test_a_thread_is_not_found_unless_it_is_created(served, client, path):
    body = {"max_tokens": 5, "messages": [USER], "thread": {"type": "continue", "previous_message_id": "msg_1"}}
    with pytest.raises(anthropic.NotFoundError, match="stores no threads") as refused:
        await client.post(path, body=body, cast_to=object)
    assert type(refused.value).__name__ == "ThreadNotFoundError"
    assert refused.value.body["error"]["type"] == "not_found_error"
    assert refused.value.body["error"]["details"] == {"error_code": "thread_not_found"}
    await client.post(path, body={**body, "thread": {"type": "create"}}, cast_to=object)
    assert len(served.engine.requests) == (path == "/v1/messages")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_tool_runner_sends_the_whole_conversation_again(served, client, stream):
    @anthropic.beta_async_tool
    async def weather(city: str) -> str:
        """Return the weather."""
        served.engine.replies = ["Take an umbrella."]
        return f"rain in {city}"

    served.engine.replies = [CALLS.partition('\n<tool_call>\n{"name": "now"')[0], "Take an umbrella."]
    runner = client.beta.messages.tool_runner(
        model=MODEL, max_tokens=200, messages=[USER], tools=[weather], stream=stream
    )
    final = await runner.until_done()
    assert final.content[-1].text == "Take an umbrella."
    prompt = served.engine.prompt_text()
    assert "user\nhi" in prompt
    assert "weather city=Kraków</call>" in prompt
    assert "rain in Kraków for " in prompt


async def test_the_client_raises_its_own_errors(served, client):
    with pytest.raises(anthropic.NotFoundError, match="does not exist"):
        await answer_of(client, model="claude")
    with pytest.raises(anthropic.NotFoundError):
        await client.messages.count_tokens(model="claude", messages=[USER])
    with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > 1024 maximum"):
        await answer_of(client, messages=[{"role": "user", "content": "a" * 2000}])
    answer = await served.http.post("/v1/messages", content=b"{", headers={"content-type": "application/json"})
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")
    answer = await served.http.get("/v1/messages")
    assert (answer.status_code, answer.json()["type"]) == (405, "error")


async def test_disconnect_aborts_the_message(served):
    served.engine.hold_at = 3
    body = {"max_tokens": 9, "messages": [USER], "stream": True}
    async with served.http.stream("POST", "/v1/messages", json=body) as answer:
        await anext(answer.aiter_text())
    assert (await served.engine.aborted.get()).startswith("msg_")


async def test_api_key_is_accepted_in_both_headers(tmp_path):
    engine = ScriptedClient(write_byte_model(tmp_path))
    async with serving(engine, api_key=("sk-a",), drain_timeout=0.1) as guarded:
        for credentials in ({"api_key": "sk-a"}, {"auth_token": "sk-a"}):
            async with anthropic.AsyncAnthropic(base_url=guarded.url, max_retries=0, **credentials) as found:
                assert (await answer_of(found)).content[0].text == "Hello, world!"
        async with anthropic.AsyncAnthropic(base_url=guarded.url, max_retries=0, api_key="wrong") as found:
            with pytest.raises(anthropic.AuthenticationError) as refused:
                await answer_of(found)
            assert refused.value.body["error"]["type"] == "authentication_error"
        answer = await guarded.http.get("/v1/models", headers={"x-api-key": "sk-a"})
        assert answer.status_code == 401
        guarded.server.config.app.state.context.lifecycle.drain()
        draining = await guarded.http.post("/v1/messages", headers={"x-api-key": "sk-a"}, json={})
        assert (draining.status_code, draining.json()["error"]["type"]) == (503, "overloaded_error")
