"""Schemas that force calls: they accept the intended calls and no others, and the grammar supports them."""

import jsonschema
import pytest
from octavo_engine.grammar.schema import SchemaBounds
from octavo_engine.grammar.source import GrammarSource
from octavo_engine.wire.structured import StructuredOutputs
from octavo_server.output_parsing.tool_schema import arguments_schema, calls_schema

SOURCE = GrammarSource(SchemaBounds(max_bytes=20_000, max_depth=64))

#: parameters -> (arguments that fit, arguments that don't)
TOOLS = {
    "plain": (
        {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        {"city": "Oslo"},
        {"city": "Oslo", "more": 1},
    ),
    "zod": (
        {
            "$schema": "http://json-schema.org/draft-07/schema#",
            "type": "object",
            "properties": {"n": {"type": "number"}},
        },
        {"n": 1},
        {"n": "1"},
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


def is_valid(value, schema):
    return jsonschema.Draft202012Validator(schema).is_valid(value)


def call(name, arguments):
    return {"name": name, "parameters": arguments}


@pytest.mark.parametrize(("parameters", "good", "bad"), TOOLS.values(), ids=TOOLS)
def test_calls_fit_the_schemas_of_their_tools(parameters, good, bad):
    tool = {"name": "f"} if parameters is None else {"name": "f", "parameters": parameters}
    for schema in (calls_schema([tool]), calls_schema([{"name": "g"}, tool])):
        SOURCE.grammar_for(StructuredOutputs(json=schema))
        assert is_valid([call("f", good)], schema)
        assert is_valid([call("f", good), call("f", good)], schema)
        for wrong in ([], [call("f", bad)], [call("h", good)], call("f", good), [{"name": "f"}]):
            assert not is_valid(wrong, schema), wrong
    SOURCE.grammar_for(StructuredOutputs(json=arguments_schema(tool)))
    assert is_valid(good, arguments_schema(tool))
    assert not is_valid(bad, arguments_schema(tool))


def test_max_calls_allows_one_call():
    assert not is_valid([call("f", {}), call("f", {})], calls_schema([{"name": "f"}], max_calls=1))


@pytest.mark.parametrize(("others", "found"), [([], "x"), ([None], None), (["x"], "x"), (["y"], None)])
def test_shared_dialect_moves_to_the_root(others, found):
    dialects = ["x", *others]
    tools = [
        {"name": f"f{i}", "parameters": {"type": "object", **({"$schema": d} if d else {})}}
        for i, d in enumerate(dialects)
    ]
    schema = calls_schema(tools)
    assert schema.get("$schema") == found
    assert "$schema" not in str(schema["items"])
