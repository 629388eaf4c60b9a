"""Grammars that force calls: they accept the intended calls and no others, and errors name the client's schema."""

import json

import pytest
from octavo_engine.grammar.schema import SchemaBounds
from octavo_engine.grammar.source import GrammarSource
from octavo_engine.wire.errors import InvalidRequest
from octavo_engine.wire.structured import StructuredOutputs
from octavo_server.output_parsing.tool_grammar import arguments_part, calls_shape
from octavo_server.output_parsing.tool_use import RequiredToolParser
from octavo_testing.grammars import BOUNDS, accepts

DRAFT_7 = "http://json-schema.org/draft-07/schema#"
UNIQUE = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}

#: parameters -> (arguments that fit, arguments that don't)
TOOLS = {
    "plain": (
        {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        {"city": "Oslo"},
        {"city": "Oslo", "more": 1},
    ),
    "zod": ({"$schema": DRAFT_7, "type": "object", "properties": {"n": {"type": "number"}}}, {"n": 1}, {"n": "1"}),
    "a tuple of draft 7": (
        {
            "$schema": DRAFT_7,
            "type": "object",
            "properties": {"at": {"type": "array", "items": [{"type": "number"}, {"type": "null"}], "minItems": 2}},
        },
        {"at": [1, None]},
        {"at": [None, 1]},
    ),
    "pydantic": (
        {
            "$defs": {"Unit": {"enum": ["C", "F"], "type": "string"}},
            "properties": {"unit": {"anyOf": [{"$ref": "#/$defs/Unit"}, {"type": "null"}], "default": None}},
            "type": "object",
        },
        {"unit": "C"},
        {"unit": "K"},
    ),
    "recursive": (
        {"type": "object", "properties": {"n": {"type": "integer"}, "next": {"$ref": "#"}}, "required": ["n"]},
        {"n": 1, "next": {"n": 2}},
        {"n": 1, "next": {}},
    ),
    "an anchor and an id": (
        {
            "$id": "https://example.org/tool",
            "type": "object",
            "properties": {"a": {"$ref": "#name"}},
            "$defs": {"x": {"$anchor": "name", "type": "string"}},
        },
        {"a": "x"},
        {"a": 1},
    ),
    "names like keywords": (
        {
            "type": "object",
            "properties": {"enum": {"$ref": "#/definitions/a"}, "$ref": {"const": {"$ref": "#/x"}}},
            "definitions": {"a": {"type": "string"}},
        },
        {"enum": "x", "$ref": {"$ref": "#/x"}},
        {"enum": 1},
    ),
    "nothing": (None, {}, {"x": 1}),
    "anything": ({"type": "object"}, {"x": 1}, []),
}


def call(name, arguments):
    return {"name": name, "parameters": arguments}


def tool(name, parameters=None):
    return {"name": name} if parameters is None else {"name": name, "parameters": parameters}


def forced(*tools, one_call_only=False):
    parts = {t["name"]: arguments_part(t, f"tools[{i}].function.parameters") for i, t in enumerate(tools)}
    return calls_shape(RequiredToolParser.notations, parts, one_call_only=one_call_only)


@pytest.mark.parametrize("neighbour", TOOLS)
@pytest.mark.parametrize(("parameters", "good", "bad"), TOOLS.values(), ids=TOOLS)
def test_calls_fit_the_schemas_of_their_tools(parameters, good, bad, neighbour):
    other, fits, _ = TOOLS[neighbour]
    for shape in (forced(tool("f", parameters)), forced(tool("g", other), tool("f", parameters))):
        assert accepts(shape, json.dumps([call("f", good)]))
        assert accepts(shape, json.dumps([call("f", good), call("f", good)], indent=2))
        for wrong in ([], [call("f", bad)], [call("h", good)], call("f", good), [{"name": "f"}]):
            assert not accepts(shape, json.dumps(wrong)), wrong
    assert accepts(forced(tool("g", other), tool("f", parameters)), json.dumps([call("g", fits), call("f", good)]))
    named = StructuredOutputs(**arguments_part(tool("f", parameters), "x"))
    assert accepts(named, json.dumps(good))
    assert not accepts(named, json.dumps(bad))


def test_one_call_only_allows_one_call():
    assert accepts(forced(tool("f"), one_call_only=True), json.dumps([call("f", {})]))
    assert not accepts(forced(tool("f"), one_call_only=True), json.dumps([call("f", {}), call("f", {})]))


def test_whitespace_between_calls_can_be_banned():
    shape = forced(tool("f"))
    shape.disable_any_whitespace = True
    assert accepts(shape, '[{"name":"f","parameters":{}}]')
    assert not accepts(shape, '[{"name": "f","parameters":{}}]')
    assert not accepts(shape, '[{"name":"f","parameters":{ }}]')


@pytest.mark.parametrize(
    ("parameters", "bounds", "place", "words"),
    [
        (UNIQUE, BOUNDS, "tools[1].function.parameters", "at #/properties/a/uniqueItems: the keyword 'uniqueItems'"),
        ({"$ref": "#/$defs/none"}, BOUNDS, "tools[1].function.parameters", "at #:"),
        ({"description": "x" * 300}, SchemaBounds(max_bytes=300, max_depth=9), "tools[1].function.parameters", "300"),
        ({"description": "x" * 250}, SchemaBounds(max_bytes=300, max_depth=9), "tools", "the limit is 300"),
        ({"items": {"items": {}}}, SchemaBounds(max_bytes=99, max_depth=2), "tools[1].function.parameters", "3 levels"),
    ],
    ids=["keyword", "reference", "bytes", "bytes of all", "depth"],
)
def test_an_unenforceable_schema_is_named_by_its_place(parameters, bounds, place, words):
    """The bound on bytes holds for each schema and for all of a request's."""
    with pytest.raises(InvalidRequest) as caught:
        GrammarSource(bounds).grammar_for(forced(tool("f"), tool("g", parameters)))
    assert caught.value.param == place
    assert str(caught.value).startswith(f"{place}: ")
    assert words in str(caught.value)
    assert "structured_outputs" not in str(caught.value)
