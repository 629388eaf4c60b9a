"""The types that a schema gives an argument, and the JSON of arguments that are written as text."""

import json

import pytest
from octavo_server.output_parsing.argument_types import ANY, STRING, ArgumentValue, typed_json, types_of

CITY = {"$defs": {"a/b": {"anyOf": [{"$ref": "#/$defs/a~1b"}, {"enum": ["x", 1, None]}]}, "n": {"type": "number"}}}


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"type": "string"}, {"string"}),
        ({"type": ["integer", "null"], "enum": ["a"]}, {"integer", "null"}),
        ({"anyOf": [{"type": "string"}, {"oneOf": [{"type": "array"}]}]}, {"string", "array"}),
        ({"allOf": [{"$ref": "#/$defs/n"}], "description": "x"}, {"number"}),
        ({"$ref": "#/$defs/a~1b"}, {"string", "integer", "number", "null"}),
        ({"const": [1]}, {"array"}),
        ({"enum": [1.0, 1.5, {}, True]}, {"integer", "number", "object", "boolean"}),
        ({"type": "dict"}, ANY),
        ({"$ref": "#/$defs/none"}, set()),
        ({"$ref": "other.json"}, set()),
        ({"anyOf": 3, "enum": 3, "$ref": 3}, set()),
        ({}, set()),
        (True, set()),
    ],
)
def test_types_of_a_schema(schema, types):
    assert types_of({**CITY, "properties": {"a": schema}}, "a") == types


@pytest.mark.parametrize(
    ("parameters", "types"),
    [
        ({}, set()),
        ({"properties": []}, set()),
        ({"properties": {"b": {"type": "null"}}, "additionalProperties": {"type": "integer"}}, {"integer"}),
    ],
)
def test_types_of_a_parameter_that_no_property_names(parameters, types):
    assert types_of(parameters, "a") == types


@pytest.mark.parametrize(
    ("text", "types", "expected"),
    [
        ("5", "string", '"5"'),
        (' "5"\n', "string", '" \\"5\\"\\n"'),
        ("5", "string integer", "5"),
        ("5.0", "integer", "5.0"),
        ("5.5", "integer", "5.5"),
        ("5.5", "integer string", '"5.5"'),
        (" +5\n", "integer", "5"),
        ("1e999", "number", "1e999"),
        ("NaN", "number", '"NaN"'),
        ("five", "integer", '"five"'),
        ("9" * 5000, "integer", f'"{"9" * 5000}"'),
        ("٣", "integer", '"٣"'),
        ("TRUE", "boolean", "true"),
        ("0", "boolean", "false"),
        ("1", "boolean integer", "1"),
        ("None", "object null", "null"),
        ("null", "string", '"null"'),
        ("null", "string null", "null"),
        ("null", "integer", "null"),
        ('{"a": "b\nc\\d"}', "object", '{"a": "b\\nc\\\\d"}'),
        ("{'a': (1, None)}", "object", '{"a": [1, null]}'),
        ("[1, 2", "array", '"[1, 2"'),
        ("[1] x", "array", '"[1] x"'),
        ("[" * 5000, "array", f'"{"[" * 5000}"'),
        ('{"a": 1}', "string array", '"{\\"a\\": 1}"'),
        ('{"a": 1}', "array", '{"a": 1}'),
        ('"a"', "integer", '"a"'),
        ("", "integer", '""'),
    ],
)
def test_json_of_a_text_by_its_types(text, types, expected):
    found = typed_json(text, frozenset(types.split()))
    assert found == expected
    json.loads(found)


@pytest.mark.parametrize(
    ("text", "own_lines", "types", "expected"),
    [
        ("\n\na\n\n", True, STRING, '"\\na\\n"'),
        ("\n", True, STRING, '""'),
        ("", True, STRING, '""'),
        ("\na\n", False, STRING, '"\\na\\n"'),
        ("\na\n", True, ANY, '"a"'),
        ("\n[1]\n", True, ANY, "[1]"),
    ],
)
def test_value_is_the_same_in_chunks(text, own_lines, types, expected):
    for pieces in ([text], [*text], ["", *text, ""]):
        value = ArgumentValue(types, own_lines=own_lines)
        assert "".join([*map(value.push, pieces), value.finish()]) == expected


def test_string_is_emitted_as_it_arrives():
    value = ArgumentValue(STRING, own_lines=True)
    assert [value.push("\n"), value.push('a"'), value.push("\n"), value.push("b"), value.finish()] == [
        *('"', 'a\\"', "", "\\nb", '"')
    ]
    assert ArgumentValue(STRING, own_lines=True).break_off() == '"'
