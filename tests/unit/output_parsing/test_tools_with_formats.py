"""Tools, forced or not, beside a format or not: what fits is accepted, answers are valid, and streams equal the whole.

`test_tools_with_formats_many` has all schemas, modes and parsers.
"""

import json

import pytest
from octavo_engine.grammar.source import GrammarSource
from octavo_engine.wire.errors import InvalidRequest
from octavo_engine.wire.sampling import SamplingParams
from octavo_engine.wire.structured import StructuredOutputs
from octavo_server.output_parsing.tool_grammar import begins_as_call
from octavo_server.output_parsing.tool_use import AUTO_IS_OFF, ToolSettings, tool_use
from octavo_testing.grammars import BOUNDS, EOS, OTHER_EOS, allowed, state_of
from octavo_testing.tool_answers import MODES, ask, check
from octavo_testing.tool_schemas import SCHEMAS

CITY = SCHEMAS["string"][0]
NODE = SCHEMAS["a reference to the root"][0]
TOOL = {"type": "function", "function": {"name": "f", "parameters": CITY}}
FORMAT = StructuredOutputs(json=CITY)
AUTO = ToolSettings(tool_call_parser="hermes", enable_auto_tool_choice=True)


@pytest.mark.parametrize("format_name", [None, "zod"])
@pytest.mark.parametrize("names", [["a list"], ["tuple of draft 7", "$anchor"]], ids=["one tool", "two tools"])
@pytest.mark.parametrize("mode", MODES)
def test_answers_fit_their_schemas(mode, names, format_name):
    check(names, mode=mode, format_name=format_name, parser="hermes", num_random=2)


@pytest.mark.parametrize("mode", ["required", "named"])
def test_forced_calls_are_json_for_a_parser_of_tags(mode):
    check(["a list"], mode=mode, format_name=None, parser="glm45", num_random=2)


@pytest.mark.parametrize("format_name", ["texts like markers", "a call within", "a call's own keys", "anything"])
@pytest.mark.parametrize("parser", ["hermes", "mistral", "llama3_json"])
def test_a_format_that_looks_like_calls_stays_text(parser, format_name):
    check(["nothing"], mode="auto", format_name=format_name, parser=parser, num_random=2)


def test_a_call_without_a_marker_is_allowed_where_no_format_looks_like_it():
    call = '{"name": "f", "parameters": {"v": "a"}}'
    for name, (schema, _) in SCHEMAS.items():
        asked = ask([CITY], mode="auto", format_schema=schema, parser="llama3_json")
        is_allowed = not begins_as_call(StructuredOutputs(json=schema), "parameters")
        assert bool(asked.parse(call).calls) is is_allowed, name
        if is_allowed:
            assert asked.accepts(call)


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"properties": {"name": {}, "age": {}}, "required": ["age"]}, False),
        ({"properties": {"name": {}, "age": {}}, "required": ["name"]}, True),
        ({"properties": {"parameters": {}, "age": {}}, "required": ["age"]}, True),
        ({"properties": {"age": {}}, "required": ["other"]}, True),
        ({"properties": {"age": {}}, "required": ["age"], "anyOf": [{}]}, True),
        ({"properties": [], "required": 3}, True),
        ({"properties": {"age": {}}, "required": [[]]}, True),
        ("{}", True),
        (None, True),
    ],
)
def test_only_a_required_other_property_keeps_a_format_from_looking_like_a_call(schema, expected):
    shape = StructuredOutputs(regex="a") if schema is None else StructuredOutputs(json=schema)
    assert begins_as_call(shape, "parameters") is expected


@pytest.mark.parametrize(
    "shape",
    [{"regex": "[a-c]+"}, {"choice": ["abc", "b"]}, {"grammar": 'start: "abc"'}, {"json_object": True}],
    ids=["regex", "choice", "grammar", "json_object"],
)
@pytest.mark.parametrize("parser", ["hermes", "mistral", "llama3_json"])
def test_any_shape_may_stand_beside_calls(shape, parser):
    settings = ToolSettings(tool_call_parser=parser, enable_auto_tool_choice=True)
    use = tool_use([TOOL], "auto", parallel=None, settings=settings, answer=StructuredOutputs(**shape))
    params = SamplingParams()
    use.constrain(params, lambda token: None)
    found = params.structured_outputs
    state = state_of(grammar=found.grammar, parts=found.parts)
    assert EOS in allowed(state, b"{}" if "json_object" in shape else b"abc")[0]
    marker = use.markers[0].encode()
    assert allowed(state_of(grammar=found.grammar, parts=found.parts), marker)


def test_a_marker_that_is_a_special_token_is_written_as_that_token():
    params = SamplingParams()
    use = tool_use([TOOL], "auto", parallel=None, settings=AUTO, answer=FORMAT)
    use.constrain(params, {"<tool_call>": OTHER_EOS, "</tool_call>": OTHER_EOS}.get)
    shape = params.structured_outputs
    state = state_of(grammar=shape.grammar, parts=shape.parts)
    (first,) = allowed(state, [])
    assert first.issuperset({OTHER_EOS, ord("{")})
    assert ord("<") not in first
    call = [OTHER_EOS, *b'{"name": "f", "arguments": {"v": "a"}}']
    assert OTHER_EOS in allowed(state, call)[0]
    assert EOS in allowed(state, [*call, OTHER_EOS])[0]


def test_one_call_only_ends_the_answer_after_one_call():
    params = SamplingParams()
    use = tool_use([TOOL], "auto", parallel=False, settings=AUTO, answer=FORMAT)
    use.constrain(params, lambda token: None)
    call = '<tool_call>{"name": "f", "arguments": {"v": "a"}}</tool_call>'
    shape = params.structured_outputs
    assert allowed(state_of(grammar=shape.grammar, parts=shape.parts), call.encode()) == [{EOS}]


@pytest.mark.parametrize(
    "settings",
    [
        ToolSettings(),
        ToolSettings(tool_call_parser="hermes"),
        ToolSettings(tool_call_parser="pythonic", enable_auto_tool_choice=True),
        ToolSettings(tool_call_parser="qwen3_coder", enable_auto_tool_choice=True),
    ],
    ids=["no parser", "auto is off", "a notation without a grammar", "tags"],
)
def test_where_no_grammar_of_calls_is_known_the_format_stands_alone(settings):
    use = tool_use([TOOL], None, parallel=None, settings=settings, answer=FORMAT)
    params = SamplingParams(structured_outputs=FORMAT)
    use.constrain(params, lambda token: None)
    assert params.structured_outputs is FORMAT
    assert use.new_parser() is None


def test_without_a_format_auto_needs_its_flags():
    with pytest.raises(InvalidRequest) as caught:
        tool_use([TOOL], None, parallel=None, settings=ToolSettings())
    assert str(caught.value) == AUTO_IS_OFF


@pytest.mark.parametrize(
    ("tool", "form", "place"),
    [
        ({"type": "object", "not": {}}, CITY, "tools[0].function.parameters"),
        (CITY, {"type": "object", "not": {}}, "response_format.json_schema.schema"),
    ],
)
def test_an_unenforceable_schema_of_either_is_named_by_its_place(tool, form, place):
    with pytest.raises(InvalidRequest, match="'not'") as caught:
        GrammarSource(BOUNDS).grammar_for(ask([tool], mode="auto", format_schema=form).shape)
    assert caught.value.param == place


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        ("hermes", "{"),
        ("hermes", " <x"),
        ("mistral", "[1"),
        ("llama3_json", '{"nu'),
        ("llama3_json", '{"name": "fo'),
        ("llama3_json", '{"name": "f", "b'),
        ("llama3_json", '{"name": "f"}'),
    ],
)
def test_an_answer_is_streamed_from_the_first_character_that_no_call_has(parser, text):
    stream = ask([CITY], mode="auto", format_schema=SCHEMAS["a call's keys and others"][0], parser=parser).tools
    reader = stream.new_parser()
    pieces = [reader.push(char) for char in text]
    assert not any(pieces[:-1])
    assert [event.text for event in pieces[-1]] == [text]
    assert [event.text for event in reader.push("more")] == ["more"]


def test_an_answer_that_is_cut_keeps_its_beginning():
    asked = ask([NODE], mode="auto", format_schema=CITY)
    for text in ("", " ", "<tool_", '<tool_call>{"name": "f"', '<tool_call>{"name": "f", "arguments": {"n"', '{"v": "'):
        parsed = asked.parse(text)
        shown = parsed.calls[0].arguments if parsed.calls else parsed.text
        assert json.dumps(shown or "")[1:-1] in json.dumps(text)
        assert bool(parsed.calls) is ("arguments" in text)
