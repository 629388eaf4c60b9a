"""Tools of responses and chats that are not plain functions: namespaces, custom, hosted and allowed tools."""

import json
import logging

import pytest
import pytest_asyncio
from octavo_server.openai import responses as dialect
from octavo_server.output_parsing.tool_use import ToolSettings
from octavo_testing.scripted import write_byte_model
from octavo_testing.server import MODEL, ScriptedClient, events, serving
from openai.types.chat import ChatCompletion
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

pytestmark = pytest.mark.asyncio(loop_scope="module")

RESPONSES, CHAT = "/v1/responses", "/v1/chat/completions"
TEMPLATE = (
    "{% for tool in tools or [] %}<|im_start|>{{ tool.type }} "
    "{{ tool.function.name }}: {{ tool.function.description }} "
    "{{ tool.function.parameters | tojson }}<|im_end|>\n{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls %}<call>{{ call.id }} {{ call.function.name }} {{ call.function.arguments | tojson }}"
    "</call>{% endfor %}{% if m.tool_call_id %} for {{ m.tool_call_id }}{% endif %}<|im_end|>\n{% endfor %}"
)
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "name": "weather", "parameters": CITY}
GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": 'start: "*** Begin Patch"'}
PATCH = {"type": "custom", "name": "patch", "description": "Edit files.", "format": GRAMMAR}
SHELL = {"type": "custom", "name": "shell"}
FILES = {"type": "namespace", "name": "mcp__files", "description": "Files.", "tools": [WEATHER, SHELL]}
HOSTED = [{"type": "web_search"}, {"type": "mcp", "server_label": "a"}, {"type": "image_generation"}]
INPUT = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}
TEXT = '*** Begin Patch\n+"é" 😀\\'
EVENT = TypeAdapter(ResponseStreamEvent)


def call_of(name, arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tmp_path_factory):
    engine = ScriptedClient(
        write_byte_model(tmp_path_factory.mktemp("model")), chat_template=TEMPLATE, max_model_len=4096
    )
    async with serving(engine, tools=ToolSettings(tool_call_parser="hermes", enable_auto_tool_choice=True)) as started:
        yield started


@pytest.fixture
def served(server):
    server.engine.reset()
    return server


async def respond(served, reply="Hello.", given="hi", **fields):
    served.engine.replies = [reply]
    answer = await served.http.post(RESPONSES, json={"input": given, **fields})
    assert answer.status_code == 200, answer.text
    Response.model_validate(answer.json())
    return answer.json()


async def stream(served, reply, **fields):
    served.engine.replies = [reply]
    answer = await served.http.post(RESPONSES, json={"input": "hi", "stream": True, **fields})
    assert answer.status_code == 200, answer.text
    read = [json.loads(frame.split("\ndata: ")[1]) for frame in answer.text.split("\n\n")[:-1]]
    for event in read:
        assert type(EVENT.validate_python(event)).__name__ != "ResponseErrorEvent"
    return read


async def refused(served, path, **fields):
    given = {"input": "hi"} if path == RESPONSES else {"messages": [{"role": "user", "content": "hi"}]}
    answer = await served.http.post(path, json={**given, **fields})
    assert answer.status_code == 400, answer.text
    assert served.engine.requests == []
    return answer.json()["error"]["param"]


def prompt_of(served):
    return served.engine.prompt_text()


def offered(served):
    """Name -> description and parameters of each tool in the prompt."""
    tools = [part.split(" ", 2) for part in prompt_of(served).split("<|im_start|>") if part.startswith("function ")]
    return {name.removesuffix(":"): rest.removesuffix("<|im_end|>\n") for _, name, rest in tools}


async def test_a_custom_tool_is_a_function_with_one_text_to_the_model(served):
    await respond(served, tools=[PATCH, WEATHER])
    patch = offered(served)["patch"]
    assert patch.startswith("Edit files.\n")
    assert GRAMMAR["definition"] in patch
    assert json.loads(patch[patch.index("{") :]) == INPUT
    assert [*offered(served)] == ["patch", "weather"]


async def test_a_custom_tool_call_has_its_input_as_text(served):
    answer = await respond(served, "Sure." + call_of("patch", {"input": TEXT}), tools=[PATCH, WEATHER])
    message, call = answer["output"]
    assert message["content"][0]["text"] == "Sure."
    assert (call["type"], call["name"], call["input"], call["status"]) == (
        "custom_tool_call",
        "patch",
        TEXT,
        "completed",
    )
    assert call["id"].startswith("ctc_")
    assert "namespace" not in call


async def test_the_stream_of_a_custom_tool_call_has_its_own_events(served):
    reply = call_of("patch", {"input": TEXT}) + call_of("weather", {"city": "Kraków"})
    read = await stream(served, reply, tools=[PATCH, WEATHER])
    added, *deltas, done, ended = [event for event in read if event.get("output_index") == 0]
    assert (added["item"]["type"], added["item"]["input"], added["item"]["status"]) == (
        "custom_tool_call", "", "in_progress",
    )  # fmt: skip
    assert {event["type"] for event in deltas} == {"response.custom_tool_call_input.delta"}
    assert "".join(event["delta"] for event in deltas) == done["input"] == ended["item"]["input"] == TEXT
    assert len(deltas) > 3
    assert {event["item_id"] for event in [*deltas, done]} == {added["item"]["id"]}
    assert done["type"] == "response.custom_tool_call_input.done"
    last = read[-1]["response"]
    assert [item["type"] for item in last["output"]] == ["custom_tool_call", "function_call"]
    assert json.loads(last["output"][1]["arguments"]) == {"city": "Kraków"}


@pytest.mark.parametrize("arguments", ["x y", {"patch": "x"}, {}])
async def test_other_arguments_of_a_custom_tool_are_not_lost(served, arguments):
    answer = await respond(served, call_of("patch", arguments), tools=[PATCH])
    assert answer["output"][0]["input"] == (arguments if isinstance(arguments, str) else json.dumps(arguments))


async def test_a_cut_call_of_a_custom_tool_is_incomplete(served):
    reply = call_of("patch", {"input": TEXT})
    answer = await respond(served, reply, tools=[PATCH], max_output_tokens=reply.index("Patch"))
    assert (answer["status"], answer["output"][0]["status"]) == ("incomplete", "incomplete")
    assert answer["output"][0]["input"] == "*** Begin "


async def test_functions_of_a_namespace_have_flat_names_in_the_prompt_only(served):
    reply = call_of("mcp__files__weather", {"city": "Kraków"}) + call_of("mcp__files__shell", {"input": "ls"})
    answer = await respond(served, reply, tools=[WEATHER, FILES])
    assert [*offered(served)] == ["weather", "mcp__files__weather", "mcp__files__shell"]
    weather, shell = answer["output"]
    assert (weather["type"], weather["name"], weather["namespace"]) == ("function_call", "weather", "mcp__files")
    assert (shell["type"], shell["name"], shell["namespace"]) == ("custom_tool_call", "shell", "mcp__files")
    assert shell["input"] == "ls"
    assert answer["tools"] == [WEATHER, FILES]
    (added, _) = [e for e in await stream(served, reply, tools=[FILES]) if e["type"] == "response.output_item.added"]
    assert (added["item"]["name"], added["item"]["namespace"]) == ("weather", "mcp__files")


async def test_a_name_with_underscores_is_not_a_namespace(served):
    plain = {**WEATHER, "name": "get__weather"}
    answer = await respond(served, call_of("get__weather", {"city": "a"}), tools=[plain, FILES])
    assert answer["output"][0]["name"] == "get__weather"
    assert "namespace" not in answer["output"][0]


async def test_items_of_these_tools_return_to_the_prompt(served):
    reply = call_of("mcp__files__weather", {"city": "a"}) + call_of("patch", {"input": TEXT})
    output = (await respond(served, reply, tools=[PATCH, FILES]))["output"]
    results = [
        {"type": "function_call_output", "call_id": output[0]["call_id"], "output": "rain"},
        {"type": "custom_tool_call_output", "call_id": output[1]["call_id"], "output": [
            {"type": "input_text", "text": "done"}
        ]},
    ]  # fmt: skip
    hosted = {
        "type": "web_search_call",
        "id": "ws_1",
        "status": "completed",
        "action": {"type": "search", "query": "a"},
    }
    given = [{"role": "user", "content": "hi"}, hosted, *output, *results]
    await respond(served, given=given, tools=[PATCH, FILES])
    prompt = prompt_of(served)
    assert f'<call>{output[0]["call_id"]} mcp__files__weather {{"city": "a"}}</call>' in prompt
    assert f"<call>{output[1]['call_id']} patch {json.dumps({'input': TEXT}, ensure_ascii=False)}</call>" in prompt
    assert f"tool\nrain for {output[0]['call_id']}" in prompt
    assert f"tool\ndone for {output[1]['call_id']}" in prompt
    assert "search" not in prompt


async def test_hosted_tools_are_ignored_with_one_warning_for_each_type(served, caplog):
    dialect._warn_ignored.cache_clear()
    with caplog.at_level(logging.WARNING, logger=dialect.__name__):
        for _ in range(2):
            await respond(served, tools=[*HOSTED, WEATHER])
    assert [*offered(served)] == ["weather"]
    assert [record.args[0] for record in caplog.records if record.name == dialect.__name__] == [
        tool["type"] for tool in HOSTED
    ]
    await respond(served, tools=HOSTED)
    assert offered(served) == {}


ALLOWED = {
    "auto": ({"mode": "auto", "tools": [WEATHER]}, ["weather"]),
    "a custom tool": ({"mode": "auto", "tools": [{"type": "custom", "name": "patch"}]}, ["patch"]),
    "a namespace": (
        {"mode": "auto", "tools": [{"type": "namespace", "name": "mcp__files"}]},
        ["mcp__files__weather", "mcp__files__shell"],
    ),
    "of a namespace": (
        {"mode": "required", "tools": [{"type": "function", "name": "weather", "namespace": "mcp__files"}]},
        ["mcp__files__weather"],
    ),
    "flat name": ({"mode": "auto", "tools": [{"type": "custom", "name": "mcp__files__shell"}]}, ["mcp__files__shell"]),
    "short name": ({"mode": "auto", "tools": [SHELL]}, ["mcp__files__shell"]),
    "hosted too": ({"mode": "required", "tools": [{"type": "web_search"}, WEATHER]}, ["weather"]),
    "only hosted": ({"mode": "auto", "tools": [{"type": "web_search"}]}, []),
}


@pytest.mark.parametrize(("allowed", "names"), ALLOWED.values(), ids=ALLOWED.keys())
async def test_allowed_tools_are_all_that_the_model_gets(served, allowed, names):
    choice = {"type": "allowed_tools", **allowed}
    answer = await respond(served, tools=[PATCH, WEATHER, FILES, *HOSTED], tool_choice=choice)
    assert [*offered(served)] == names
    assert answer["tool_choice"]["type"] == "allowed_tools"
    assert bool(served.engine.requests[0].params.structured_outputs) == (allowed["mode"] == "required")


@pytest.mark.parametrize("choice", [{"type": "custom", "name": "patch"}, "required"])
async def test_forced_calls_of_a_custom_tool(served, choice):
    reply = {"input": TEXT} if isinstance(choice, dict) else [{"name": "patch", "parameters": {"input": TEXT}}]
    answer = await respond(served, json.dumps(reply), tools=[PATCH], tool_choice=choice)
    assert [(item["type"], item["input"]) for item in answer["output"]] == [("custom_tool_call", TEXT)]
    assert '"input"' in str(served.engine.requests[0].grammar)


REFUSED = {
    "required, but nothing left": ({"tools": HOSTED, "tool_choice": "required"}, "tool_choice"),
    "a hosted choice": ({"tools": [*HOSTED, WEATHER], "tool_choice": {"type": "web_search"}}, "tool_choice"),
    "a choice that isn't there": ({"tools": [WEATHER], "tool_choice": {"type": "custom", "name": "a"}}, "tool_choice"),
    "a choice of another type": (
        {"tools": [PATCH], "tool_choice": {"type": "function", "name": "patch"}},
        "tool_choice",
    ),
    "an allowed tool that isn't there": (
        {"tools": [WEATHER], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [SHELL]}},
        "tool_choice",
    ),
    "an unknown type": ({"tools": [{"type": "telepathy", "name": "a"}]}, "tools[0].type"),
    "a namespace without a name": ({"tools": [{"type": "namespace", "tools": [WEATHER]}]}, "tools[0].name"),
    "a nested function without a name": (
        {"tools": [{"type": "namespace", "name": "a", "tools": [{"type": "function"}]}]},
        "tools[0].tools[0].name",
    ),
    "a nested namespace": ({"tools": [{"type": "namespace", "name": "a", "tools": [FILES]}]}, "tools[0].tools[0].type"),
    "a bad name": ({"tools": [{**FILES, "name": "a b"}]}, "tools[0].tools[0].name"),
    "too many tools": (
        {"tools": [{"type": "namespace", "name": "a", "tools": [WEATHER] * 1024}]},
        "tools",
    ),
    "a call without input": (
        {"input": [{"type": "custom_tool_call", "call_id": "a", "name": "patch"}]},
        "input[0].input",
    ),
}


@pytest.mark.parametrize(("fields", "param"), REFUSED.values(), ids=REFUSED.keys())
async def test_error_names_the_tool_of_a_response(served, fields, param):
    assert await refused(served, RESPONSES, **fields) == param


CHAT_WEATHER = {"type": "function", "function": {"name": "weather", "parameters": CITY}}
CHAT_PATCH = {
    "type": "custom",
    "custom": {
        "name": "patch",
        "description": "Edit files.",
        "format": {"type": "grammar", "grammar": {"syntax": "lark", "definition": GRAMMAR["definition"]}},
    },
}


async def chat(served, reply="Hello.", messages=({"role": "user", "content": "hi"},), **fields):
    served.engine.replies = [reply]
    answer = await served.http.post(CHAT, json={"model": MODEL, "messages": [*messages], **fields})
    assert answer.status_code == 200, answer.text
    return answer


async def test_chat_has_custom_tools(served):
    reply = call_of("patch", {"input": TEXT}) + call_of("weather", {"city": "a"})
    answer = (await chat(served, reply, tools=[CHAT_PATCH, CHAT_WEATHER])).json()
    patch = offered(served)["patch"]
    assert GRAMMAR["definition"] in patch
    assert json.loads(patch[patch.index("{") :]) == INPUT
    custom, function = ChatCompletion.model_validate(answer).choices[0].message.tool_calls
    assert (custom.type, custom.custom.name, custom.custom.input) == ("custom", "patch", TEXT)
    assert (function.type, function.function.name) == ("function", "weather")
    assert answer["choices"][0]["finish_reason"] == "tool_calls"
    sent = answer["choices"][0]["message"]
    asked = {"role": "user", "content": "hi"}
    result = {"role": "tool", "tool_call_id": custom.id, "content": "done"}
    await chat(served, messages=[asked, sent, result], tools=[CHAT_PATCH, CHAT_WEATHER])
    assert f"<call>{custom.id} patch {json.dumps({'input': TEXT}, ensure_ascii=False)}</call>" in prompt_of(served)


async def test_chat_streams_the_input_of_custom_tools(served):
    reply = call_of("weather", {"city": "a"}) + call_of("patch", {"input": TEXT})
    frames = events((await chat(served, reply, tools=[CHAT_PATCH, CHAT_WEATHER], stream=True)).text)[:-1]
    deltas = [call for f in frames for c in json.loads(f)["choices"] for call in c["delta"].get("tool_calls", ())]
    first, *rest = [delta for delta in deltas if delta["index"] == 1]
    assert (first["type"], first["custom"]) == ("custom", {"name": "patch", "input": ""})
    assert "".join(delta["custom"]["input"] for delta in rest) == TEXT
    assert all("function" not in delta for delta in [first, *rest])
    assert all("custom" not in delta for delta in deltas if delta["index"] == 0)


@pytest.mark.parametrize("mode", ["auto", "required"])
async def test_chat_has_allowed_tools(served, mode):
    tools = {"mode": mode, "tools": [{"type": "custom", "custom": {"name": "patch"}}]}
    choice = {"type": "allowed_tools", "allowed_tools": tools}
    reply = json.dumps([{"name": "patch", "parameters": {"input": TEXT}}]) if mode == "required" else "Hello."
    answer = (await chat(served, reply, tools=[CHAT_WEATHER, CHAT_PATCH], tool_choice=choice)).json()
    assert [*offered(served)] == ["patch"]
    if mode == "required":
        assert answer["choices"][0]["message"]["tool_calls"][0]["custom"]["input"] == TEXT


async def test_chat_forces_a_custom_tool_by_its_name(served):
    choice = {"type": "custom", "custom": {"name": "patch"}}
    answer = await chat(served, json.dumps({"input": TEXT}), tools=[CHAT_WEATHER, CHAT_PATCH], tool_choice=choice)
    assert answer.json()["choices"][0]["message"]["tool_calls"][0]["custom"]["input"] == TEXT


REFUSED_CHATS = {
    "a custom tool without a name": ({"tools": [{"type": "custom", "custom": {}}]}, "tools[0].custom.name"),
    "a custom tool without fields": ({"tools": [{"type": "custom"}]}, "tools[0].custom.name"),
    "a bad name": ({"tools": [{"type": "custom", "custom": {"name": "a b"}}]}, "tools[0].custom.name"),
    "an allowed tool that isn't there": (
        {
            "tools": [CHAT_WEATHER],
            "tool_choice": {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "a"}}]},
            },
        },
        "tool_choice",
    ),
    "required, but nothing allowed": (
        {
            "tools": [CHAT_WEATHER],
            "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": []}},
        },
        "tool_choice",
    ),
}


@pytest.mark.parametrize(("fields", "param"), REFUSED_CHATS.values(), ids=REFUSED_CHATS.keys())
async def test_error_names_the_tool_of_a_chat(served, fields, param):
    assert await refused(served, CHAT, **fields) == param
