"""Schemas and grammars that the grammar library cannot read, from the clients of OpenAI and Anthropic: the answer is a
400 with the place, also to a request for a stream, and the server continues."""

import anthropic
import openai
import pytest
import pytest_asyncio
from octavo_server.output_parsing.tool_use import ToolSettings
from octavo_testing.scripted import write_byte_model
from octavo_testing.server import MODEL, ScriptedClient, serving

pytestmark = pytest.mark.asyncio(loop_scope="module")

USER = [{"role": "user", "content": "hi"}]
CHAIN = {f"d{i}": {"properties": {"a": {"$ref": f"#/$defs/d{i + 1}"}}} for i in range(2000)}
#: Name -> schema and the place in the error.
SCHEMAS = {
    "beyond a double": ({"type": "object", "properties": {"a": {"maximum": 10**400}}}, "#/properties/a/maximum:"),
    "the lowest integer": ({"type": "object", "properties": {"a": {"const": -(2**63)}}}, "#/properties/a/const:"),
    "a type of no kind": ({"properties": {"a": {"format": "date", "type": 1}}}, "#/properties/a/type:"),
    "a long chain": ({"$ref": "#/$defs/d0", "$defs": {**CHAIN, "d2000": {}}}, "at #/$defs/d"),
}
NAMES = ("amp", "lt", "gt", "quot", "apos", "nbsp", "copy", "reg", "euro")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tmp_path_factory):
    engine = ScriptedClient(write_byte_model(tmp_path_factory.mktemp("model")))
    async with serving(engine, tools=ToolSettings(tool_call_parser="hermes", enable_auto_tool_choice=True)) as started:
        yield started


@pytest_asyncio.fixture(loop_scope="module")
async def claude(served):
    async with anthropic.AsyncAnthropic(base_url=served.url, api_key="none", max_retries=0) as client:
        yield client


def fields_with(schema):
    """Name -> the fields of a chat request that hold a schema, and the field that the error names."""
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    named = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
    return {
        "format": ({"response_format": named}, "response_format.json_schema.schema"),
        "guided": ({"extra_body": {"guided_json": schema}}, "guided_json"),
        "outputs": ({"extra_body": {"structured_outputs": {"json": schema}}}, "structured_outputs.json"),
        "tool": ({"tools": [tool], "tool_choice": "required"}, "tools[0].function.parameters"),
    }


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("field", ["format", "guided", "outputs", "tool"])
@pytest.mark.parametrize("name", SCHEMAS)
async def test_openais_client_gets_the_place_of_a_bad_schema(served, name, field, stream):
    schema, place = SCHEMAS[name]
    fields, param = fields_with(schema)[field]
    with pytest.raises(openai.BadRequestError) as caught:
        await served.openai.chat.completions.create(model=MODEL, messages=USER, stream=stream, **fields)
    assert caught.value.param == param
    assert place in caught.value.message


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e400"])
async def test_a_schema_as_text_may_hold_what_only_python_reads(served, number, stream):
    extra = {"guided_json": f'{{"items": {{"const": {number}}}}}'}
    with pytest.raises(openai.BadRequestError, match="#/items/const:"):
        await served.openai.completions.create(model=MODEL, prompt="hi", stream=stream, extra_body=extra)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", SCHEMAS)
async def test_the_responses_api_names_the_place(served, name, stream):
    schema, place = SCHEMAS[name]
    text = {"format": {"type": "json_schema", "name": "s", "schema": schema}}
    with pytest.raises(openai.BadRequestError) as caught:
        await served.openai.responses.create(model=MODEL, input="hi", text=text, stream=stream)
    assert caught.value.param == "text.format.schema"
    assert place in caught.value.message


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", SCHEMAS)
async def test_anthropics_client_gets_the_place_of_a_bad_schema(served, claude, name, stream):
    schema, place = SCHEMAS[name]
    tool = {"name": "f", "input_schema": {"type": "object", **schema}}
    for fields in (
        {"tools": [tool], "tool_choice": {"type": "any"}},
        {"output_config": {"format": {"type": "json_schema", "schema": schema}}},
    ):
        with pytest.raises(anthropic.BadRequestError) as caught:
            await claude.messages.create(model=MODEL, max_tokens=5, messages=USER, stream=stream, **fields)
        assert place in caught.value.message


@pytest.mark.parametrize("rule", ["root ::= ", "start: "])
async def test_a_grammar_of_quoted_entities_is_served(served, rule):
    grammar = rule + " | ".join(f'"&{name};"' for name in NAMES)
    create = served.openai.completions.create
    whole = await create(model=MODEL, prompt="hi", extra_body={"guided_grammar": grammar})
    stream = await create(model=MODEL, prompt="hi", stream=True, extra_body={"guided_grammar": grammar})
    assert whole.choices[0].text == "".join([chunk.choices[0].text async for chunk in stream]) != ""
