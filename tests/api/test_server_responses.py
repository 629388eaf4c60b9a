"""`/v1/responses` through the official client: text, items, calls, reasoning, stream events and errors."""

import json
import re

import pytest
import pytest_asyncio
from octavo_engine.wire.hashing import tenant_salt
from octavo_server.output_parsing.tool_use import ToolSettings
from octavo_testing.grammars import accepts
from octavo_testing.scripted import write_byte_model
from octavo_testing.server import MODEL, ScriptedClient, serving
from openai import BadRequestError, NotFoundError
from pydantic import BaseModel

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
    "type": "function",
    "name": "weather",
    "description": "of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "strict": True,
}
NOW = {"type": "function", "name": "now"}
CALLS = (
    'Sure.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Kraków"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
)
THOUGHT = "<think>\nHm, the weather.\n</think>\n\n"


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


async def respond(served, given="hi", **fields):
    return await served.openai.responses.create(**{"model": MODEL, "input": given, **fields})


async def raw_events(served, given="hi", **fields):
    answer = await served.http.post("/v1/responses", json={"input": given, "stream": True, **fields})
    assert (answer.status_code, answer.headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
    *frames, rest = answer.text.split("\n\n")
    assert rest == ""
    events = []
    for frame in frames:
        name, data = frame.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def prompt_of(served):
    return served.engine.prompt_text()


async def test_plain_response_has_all_fields(served):
    served.engine.num_cached_tokens = 2
    answer = await respond(served, instructions="Be kind.", metadata={"a": "b"}, temperature=0.5, user="me")
    assert (answer.output_text, answer.status, answer.object, answer.model) == (
        "Hello, world!",
        "completed",
        "response",
        MODEL,
    )
    (message,) = answer.output
    assert (message.type, message.role, message.status) == ("message", "assistant", "completed")
    assert answer.id.startswith("resp_")
    assert message.id.startswith("msg_")
    assert answer.usage.input_tokens == len(served.engine.requests[0].prompt_token_ids)
    assert (answer.usage.output_tokens, answer.usage.input_tokens_details.cached_tokens) == (14, 2)
    assert answer.usage.total_tokens == answer.usage.input_tokens + 14
    assert (answer.instructions, answer.metadata, answer.temperature, answer.user) == (
        "Be kind.", {"a": "b"}, 0.5, "me",
    )  # fmt: skip
    assert (answer.store, answer.background, answer.truncation, answer.previous_response_id) == (
        False, False, "disabled", None,
    )  # fmt: skip
    assert (
        prompt_of(served)
        == "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )


async def test_text_stream_has_all_events_in_order(served):
    events = await raw_events(served)
    kinds = [event["type"].removeprefix("response.") for event in events]
    num_deltas = kinds.count("output_text.delta")
    assert kinds == [
        *("created", "in_progress", "output_item.added", "content_part.added"),
        *["output_text.delta"] * num_deltas,
        *("output_text.done", "content_part.done", "output_item.done", "completed"),
    ]
    assert "".join(e["delta"] for e in events if e["type"].endswith("delta")) == "Hello, world!"
    assert events[0]["response"]["status"] == "in_progress"
    assert (events[0]["response"]["output"], events[2]["item"]["content"]) == ([], [])
    done = {event["type"].removeprefix("response."): event for event in events}
    assert done["output_text.done"]["text"] == "Hello, world!"
    assert done["completed"]["response"]["output"] == [done["output_item.done"]["item"]]
    assert {e["item_id"] for e in events if "item_id" in e} == {done["output_item.done"]["item"]["id"]}
    assert done["completed"]["response"]["usage"]["output_tokens"] == 14


async def test_openai_client_reads_a_stream(served):
    async with served.openai.responses.stream(model=MODEL, input="hi") as stream:
        deltas = [event.delta async for event in stream if event.type == "response.output_text.delta"]
        final = await stream.get_final_response()
    assert "".join(deltas) == final.output_text == "Hello, world!"
    created = [event async for event in await respond(served, stream=True)]
    assert created[0].type == "response.created"
    assert created[-1].type == "response.completed"


async def test_token_limit_makes_the_response_incomplete(served):
    answer = await respond(served, max_output_tokens=5)
    assert (answer.output_text, answer.status, answer.incomplete_details.reason) == (
        "Hello", "incomplete", "max_output_tokens",
    )  # fmt: skip
    assert answer.output[0].status == "incomplete"
    events = await raw_events(served, max_output_tokens=5)
    assert (events[-1]["type"], events[-1]["response"]["status"]) == ("response.incomplete", "incomplete")


async def test_input_items_become_chat_messages(served):
    items = [
        {"role": "developer", "content": "Be brief."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Where"},
                                                         {"type": "input_text", "text": "and when?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "ask"}]},
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "Kraków"}'},
        {"type": "function_call", "call_id": "c2", "name": "now", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "rain"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "noon"}]},
        {"role": "assistant", "type": "message", "id": "msg_1", "status": "completed",
         "content": [{"type": "output_text", "text": "At noon.", "annotations": []}]},
        {"role": "user", "content": "Thanks"},
    ]  # fmt: skip
    await respond(served, items)
    assert prompt_of(served).replace("<|im_start|>", "").split("<|im_end|>\n") == [
        "system\nBe brief.",
        "user\nWhere\nand when?",
        "assistant\n(ask)<call>c1 weather city=Kraków</call><call>c2 now</call>",
        "tool\nrain for c1",
        "tool\nnoon for c2",
        "assistant\nAt noon.",
        "user\nThanks",
        "assistant\n",
    ]


async def test_output_items_are_valid_input_of_the_next_request(served):
    """An agent's loop, with objects of the official client."""
    served.engine.replies = [CALLS]
    first = await respond(served, tools=[WEATHER, NOW])
    calls = [item for item in first.output if item.type == "function_call"]
    outputs = [{"type": "function_call_output", "call_id": call.call_id, "output": "ok"} for call in calls]
    served.engine.replies = ["Done."]
    given = [{"role": "user", "content": "hi"}, *first.output, *outputs]
    answer = await respond(served, given, tools=[WEATHER, NOW])
    assert answer.output_text == "Done."
    assert f"<call>{calls[0].call_id} weather city=Kraków</call><call>{calls[1].call_id} now</call>" in prompt_of(
        served
    )
    assert f"ok for {calls[1].call_id}" in prompt_of(served)


async def test_calls_become_output_items(served):
    served.engine.replies = [CALLS]
    answer = await respond(served, tools=[WEATHER, NOW])
    message, weather, now = answer.output
    assert message.content[0].text == "Sure."
    assert (weather.type, weather.name, json.loads(weather.arguments)) == (
        "function_call",
        "weather",
        {"city": "Kraków"},
    )
    assert (now.name, now.arguments, now.status) == ("now", "{}", "completed")
    assert weather.call_id != now.call_id
    assert (answer.status, answer.tools[0].name, answer.tool_choice) == ("completed", "weather", "auto")


@pytest.mark.parametrize("reply", [CALLS, THOUGHT + CALLS, THOUGHT + "It rains.", "\n\n" + CALLS[6:]])
async def test_stream_equals_the_plain_response_for_every_split(served, reply):
    served.engine.replies = [reply]
    whole = (await respond(served, tools=[WEATHER, NOW])).model_dump()
    for cuts in [None, frozenset[int](), *({cut} for cut in range(1, len(reply.encode()), 3))]:
        served.engine.yield_at = cuts
        events = await raw_events(served, tools=[WEATHER, NOW])
        items = events[-1]["response"]["output"]
        assert [_content(item) for item in items] == [_content(item) for item in whole["output"]]
        assert _replayed(events) == items


def _content(item):
    """The response without its ids."""
    texts = [part["text"] for part in item.get("content") or []]
    return item["type"], texts, item.get("name"), item.get("arguments"), item["status"]


def _replayed(events):
    """Output that a client builds from the deltas alone; every `done` event must agree with it."""
    items = []
    for event in events:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert event["output_index"] == len(items)
            items.append(event["item"])
            continue
        item = items[event["output_index"]] if "output_index" in event else None
        if kind == "content_part.added":
            assert event["content_index"] == len(item["content"])
            item["content"].append(event["part"])
        elif kind == "function_call_arguments.delta":
            item["arguments"] += event["delta"]
        elif kind.endswith(".delta"):
            item["content"][event["content_index"]]["text"] += event["delta"]
        elif kind == "function_call_arguments.done":
            assert (event["arguments"], event["name"]) == (item["arguments"], item["name"])
        elif kind == "content_part.done":
            assert event["part"] == item["content"][event["content_index"]]
        elif kind == "output_item.done":
            item["status"] = event["item"]["status"]
            assert event["item"] == item
    return items


async def test_reasoning_becomes_its_own_item(served):
    served.engine.replies = [THOUGHT + "It rains."]
    answer = await respond(served, reasoning={"effort": "low"})
    reasoning, message = answer.output
    assert (reasoning.type, reasoning.content[0].text.strip()) == ("reasoning", "Hm, the weather.")
    assert message.content[0].text.strip() == answer.output_text.strip() == "It rains."
    assert answer.reasoning.effort == "low"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "now"}], ids=["required", "named"])
async def test_forced_tool_choice_sets_the_structured_output(served, choice):
    fields = {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}
    served.engine.replies = ['[{"name": "now", "parameters": {}}]' if choice == "required" else "{}"]
    answer = await respond(served, tools=[WEATHER, NOW], tool_choice=choice, **fields)
    assert [(item.type, item.name, item.arguments) for item in answer.output] == [("function_call", "now", "{}")]
    assert accepts(served.engine.requests[0].params.structured_outputs, served.engine.replies[0])


class Weather(BaseModel):
    city: str


async def test_openai_client_parses_a_structured_answer(served):
    served.engine.replies = ['{"city": "Kraków"}']
    answer = await served.openai.responses.parse(
        model=MODEL,
        input="hi",
        text_format=Weather,
        extra_body={"chat_template_kwargs": {"enable_thinking": False}},
    )
    assert answer.output_parsed == Weather(city="Kraków")
    shape = served.engine.requests[0].params.structured_outputs
    assert shape.json["properties"] == {"city": {"title": "City", "type": "string"}}
    assert answer.text.format.type == "json_schema"


async def test_logprobs_arrive_with_the_text(served):
    answer = await respond(served, include=["message.output_text.logprobs"], top_logprobs=2, max_output_tokens=3)
    logprobs = answer.output[0].content[0].logprobs
    assert [(t.token, t.logprob, len(t.top_logprobs)) for t in logprobs] == [
        ("H", -0.3, 2),
        ("e", -0.3, 2),
        ("l", -0.3, 2),
    ]
    events = await raw_events(served, include=["message.output_text.logprobs"], max_output_tokens=3)
    assert [t["token"] for e in events if e["type"].endswith("text.delta") for t in e["logprobs"]] == ["H", "e", "l"]


async def test_sampling_fields_reach_the_engine(served):
    extra = {"top_k": 7, "seed": 3, "cache_salt": "mine", "stop": ["!"]}
    answer = await respond(served, temperature=0.7, top_p=0.9, max_output_tokens=9, extra_body=extra)
    (request,) = served.engine.requests
    params = request.params
    assert (params.temperature, params.top_p, params.max_tokens, params.top_k) == (0.7, 0.9, 9, 7)
    assert (params.seed, params.stop, request.cache_salt) == (3, ["!"], tenant_salt("", "mine"))
    assert (answer.temperature, answer.top_p, answer.max_output_tokens) == (0.7, 0.9, 9)


async def test_failure_in_mid_stream_is_the_last_event(served):
    served.engine.fail_at = 3
    events = await raw_events(served)
    assert events[-1]["type"] == "response.failed"
    response = events[-1]["response"]
    assert (response["status"], response["error"]["code"]) == ("failed", "server_error")
    assert "scripted" in response["error"]["message"]
    assert response["output"][0]["status"] == "incomplete"
    assert sum(e["type"] in ("response.failed", "response.completed", "response.incomplete") for e in events) == 1


async def test_failure_before_the_first_token_sets_the_status(served):
    served.engine.fail_at = 0
    assert (await served.http.post("/v1/responses", json={"input": "hi", "stream": True})).status_code == 500


UNIQUE = {"type": "object", "uniqueItems": True}


async def test_a_format_beside_tools_gives_json_or_calls(served):
    schema = {"type": "object", "properties": {"c": {"type": "integer"}}}
    text, extra = {"format": {"type": "json_schema", "name": "f", "schema": schema}}, {"enable_thinking": False}
    asked = {"tools": [WEATHER, NOW], "text": text, "extra_body": {"chat_template_kwargs": extra}}
    served.engine.replies = ['{"c": 3}']
    assert (await respond(served, **asked)).output_text == '{"c": 3}'
    served.engine.replies = [CALLS.removeprefix("Sure.\n")]
    answer = await respond(served, **asked)
    assert [(item.type, item.name) for item in answer.output] == [
        ("function_call", "weather"),
        ("function_call", "now"),
    ]
    assert accepts(served.engine.requests[1].params.structured_outputs, CALLS.removeprefix("Sure.\n"))
    await respond(served, **asked | {"tool_choice": "none"})
    assert not accepts(served.engine.requests[2].params.structured_outputs, CALLS.removeprefix("Sure.\n"))


def dialogue(length, size=60):
    """Items of a conversation: each user message is answered by a call, its result and a text."""
    for i in range(length):
        yield {"role": "user", "content": f"u{i} " + "x" * size}
        yield {"type": "function_call", "call_id": f"c{i}", "name": "now", "arguments": "{}"}
        yield {"type": "function_call_output", "call_id": f"c{i}", "output": f"r{i}"}
        yield {"role": "assistant", "content": f"a{i} " + "x" * size}


@pytest.mark.parametrize("stream", [False, True])
async def test_truncation_drops_the_oldest_items(served, stream):
    items = [{"role": "system", "content": "Be kind."}, *dialogue(20), {"role": "user", "content": "last"}]
    with pytest.raises(BadRequestError, match="1024"):
        await respond(served, items, stream=stream)
    answer = await respond(served, items, instructions="Obey.", truncation="auto", stream=stream)
    if stream:
        answer = [event async for event in answer][-1].response
    assert (answer.truncation, answer.output_text) == ("auto", "Hello, world!")
    prompt = prompt_of(served)
    assert prompt.startswith("<|im_start|>system\nObey.<|im_end|>\n<|im_start|>system\nBe kind.<|im_end|>\n")
    assert prompt.endswith("<|im_start|>user\nlast<|im_end|>\n<|im_start|>assistant\n")
    calls, results = (set(re.findall(pattern, prompt)) for pattern in ("<call>(c[0-9]+)", "for (c[0-9]+)<"))
    assert results <= calls
    assert [f"a{i} " in prompt for i in range(20)] == [f"u{i} " in prompt for i in range(20)]
    assert 1024 - 500 < answer.usage.input_tokens < 1024
    await respond(served, items, instructions="Obey.", truncation="auto", max_output_tokens=500)
    assert len(served.engine.requests[-1].prompt_token_ids) <= 1024 - 500


async def test_truncation_keeps_what_fits(served):
    items = [*dialogue(2), {"role": "user", "content": "last"}]
    counts = served.openai.responses.input_tokens
    whole, cut = [await counts.count(model=MODEL, input=items, truncation=kind) for kind in ("disabled", "auto")]
    assert whole.input_tokens == cut.input_tokens


async def test_truncation_never_drops_the_last_user_item(served):
    items = [*dialogue(2), {"role": "user", "content": "x" * 2000}, {"role": "assistant", "content": "well"}]
    with pytest.raises(BadRequestError) as caught:
        await respond(served, items, truncation="auto")
    assert caught.value.code == "context_length_exceeded"


@pytest.mark.parametrize("stream", [False, True])
async def test_effort_none_turns_reasoning_off(served, stream):
    served.engine.replies = ["Yes."]
    fields = {"reasoning": {"effort": "none"}, "stream": stream}
    answer = await respond(served, **fields)
    answer = [event async for event in answer][-1].response if stream else answer
    assert [item.type for item in answer.output] == ["message"]


REFUSED = {
    "previous_response_id": ({"previous_response_id": "resp_1"}, "previous_response_id"),
    "background": ({"background": True}, "background"),
    "conversation": ({"conversation": "conv_1"}, "conversation"),
    "prompt template": ({"prompt": {"id": "pmpt_1"}}, "prompt"),
    "no input": ({"input": []}, "input"),
    "empty input": ({"input": ""}, "input"),
    "input of a wrong type": ({"input": 5}, "input"),
    "a tool of an unknown type": ({"tools": [{"type": "telepathy"}]}, "tools[0].type"),
    "a function without a name": ({"tools": [{"type": "function"}]}, "tools[0].name"),
    "a choice of another kind": ({"tools": [NOW], "tool_choice": {"type": "mcp"}}, "tool_choice"),
    "a choice without tools": ({"tool_choice": "required"}, "tool_choice"),
    "a schema that isn't there": ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
    "a schema of a tool": (
        {"tools": [NOW, {"type": "function", "name": "u", "parameters": UNIQUE}], "tool_choice": "required"},
        "tools[1].parameters",
    ),
    "a schema of a format": ({"text": {"format": {"type": "json_schema", "schema": UNIQUE}}}, "text.format.schema"),
    "a name of a tool": ({"tools": [{"type": "function", "name": "a b"}], "tool_choice": "none"}, "tools[0].name"),
    "max_output_tokens": ({"max_output_tokens": 0}, "max_output_tokens"),
    "temperature": ({"temperature": 3}, "temperature"),
    "an image": (
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        "input[0].content[0].type",
    ),
    "an item of another kind": ({"input": [{"type": "computer_call"}]}, "input[0].type"),
    "a stored item": ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0]"),
    "a message without a role": ({"input": [{"content": "hi"}]}, "input[0].role"),
    "a message without content": ({"input": [{"role": "user"}]}, "input[0].content"),
    "a call without its id": (
        {"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]},
        "input[0].call_id",
    ),
    "an output without a call": ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
}


@pytest.mark.parametrize(("fields", "param"), REFUSED.values(), ids=REFUSED.keys())
async def test_error_names_an_unsupported_field(served, fields, param):
    answer = await served.http.post("/v1/responses", json={"input": "hi", **fields})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
    assert served.engine.requests == []


async def test_openai_client_raises_its_own_errors(served):
    with pytest.raises(BadRequestError, match="send the whole conversation"):
        await respond(served, previous_response_id="resp_1")
    with pytest.raises(NotFoundError, match="does not exist"):
        await respond(served, model="gpt-x")
    with pytest.raises(BadRequestError, match="maximum context length is 1024"):
        await respond(served, "a" * 2000)


async def test_responses_are_not_stored(served):
    answer = await respond(served, store=True)
    assert answer.store is False
    for call in (served.openai.responses.retrieve, served.openai.responses.cancel, served.openai.responses.delete):
        with pytest.raises(NotFoundError, match="stores no responses"):
            await call(answer.id)


async def test_rendered_response_is_the_input_of_the_engine(served):
    body = {"input": [{"role": "user", "content": "hi"}], "instructions": "Be kind.", "tools": [NOW]}
    rendered = (await served.http.post("/v1/responses/render", json=body)).json()
    assert served.engine.requests == []
    await served.http.post("/v1/responses", json=body)
    assert rendered["token_ids"] == served.engine.requests[0].prompt_token_ids
    assert rendered["request_id"].startswith("resp_")


async def test_disconnect_aborts_the_response(served):
    served.engine.hold_at = 3
    async with served.http.stream("POST", "/v1/responses", json={"input": "hi", "stream": True}) as answer:
        await anext(answer.aiter_text())
    assert (await served.engine.aborted.get()).startswith("resp_")


async def test_openai_client_reads_calls_from_a_stream(served):
    served.engine.replies = [CALLS]
    async with served.openai.responses.stream(model=MODEL, input="hi", tools=[WEATHER, NOW]) as stream:
        snapshots = [e.snapshot async for e in stream if e.type == "response.function_call_arguments.delta"]
        _, weather, now = (await stream.get_final_response()).output
    assert snapshots[-1] == now.arguments == "{}"
    assert weather.parsed_arguments == {"city": "Kraków"}
