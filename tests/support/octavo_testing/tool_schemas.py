"""Sixty schemas of type "object", as tools and formats have them, each with instances that validate."""

from typing import Any

DRAFT_7 = "http://json-schema.org/draft-07/schema#"
DRAFT_4 = "http://json-schema.org/draft-04/schema#"
SCHEMA_2019 = "https://json-schema.org/draft/2019-09/schema"
SCHEMA_2020 = "https://json-schema.org/draft/2020-12/schema"
WORD = {"type": "string", "maxLength": 4, "pattern": "^[a-z]*$"}
Case = tuple[dict[str, Any], list[Any]]


def _of(properties: dict[str, Any], *instances: Any, **keywords: Any) -> Case:
    return {"type": "object", "properties": properties, "required": [*properties], **keywords}, [*instances]


def _value(schema: Any, *values: Any, **keywords: Any) -> Case:
    return _of({"v": schema}, *({"v": value} for value in values), **keywords)


def _open(properties: dict[str, Any], *instances: Any, **keywords: Any) -> Case:
    return {"type": "object", "properties": properties, **keywords}, [*instances]


_NODE = {"type": "object", "properties": {"n": {"enum": [1, 2]}, "next": {"$ref": "#/$defs/N"}}, "required": ["n"]}
_LEAF = {"anyOf": [{"$ref": "#"}, {"type": "null"}]}
_A = {
    "type": "object",
    "properties": {"t": {"const": "a"}, "x": WORD},
    "required": ["t"],
    "additionalProperties": False,
}
_B = {"type": "object", "properties": {"t": {"const": "b"}, "y": {"type": "null"}}, "required": ["t"],
      "additionalProperties": False}  # fmt: skip

SCHEMAS: dict[str, Case] = {
    "string": _value(WORD, "abc", ""),
    "free string": _value({"type": "string", "maxLength": 9}, 'a"\\\n', "é€", "<x>"),
    "integer": _value({"type": "integer", "minimum": -3, "maximum": 120}, -3, 0, 120),
    "exclusive bounds": _value({"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 2}, 0.5, 1),
    "multiple": _value({"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 50}, 0, 45),
    "number": _value({"type": "number", "minimum": -1, "maximum": 1}, 0.25, -1),
    "boolean": _value({"type": "boolean"}, True, False),
    "null": _value({"type": "null"}, None),
    "type list": _value({"type": ["boolean", "null"]}, True, None),
    "enum": _value({"enum": ["a", 1, None, {"b": [2]}]}, "a", 1, None, {"b": [2]}),
    "const": _value({"const": {"a": 1}}, {"a": 1}),
    "array": _value({"type": "array", "items": {"type": "boolean"}, "maxItems": 3}, [], [True, False]),
    "array of arrays": _value({"type": "array", "items": {"type": "array", "items": WORD, "maxItems": 2},
                               "minItems": 1, "maxItems": 2}, [["a"], []]),
    "prefixItems": _value({"type": "array", "prefixItems": [WORD, {"type": "null"}], "items": False, "minItems": 2},
                          ["a", None]),
    "tuple of draft 7": _value({"type": "array", "items": [WORD, {"type": "null"}], "additionalItems": False,
                                "minItems": 2}, ["a", None], **{"$schema": DRAFT_7}),
    "open tuple of draft 7": _value({"type": "array", "items": [WORD], "additionalItems": {"type": "boolean"},
                                     "minItems": 1, "maxItems": 3}, ["a"], ["a", True], **{"$schema": DRAFT_7}),
    "tuple of draft 4": _value({"type": "array", "items": [{"type": "null"}], "additionalItems": False, "minItems": 1},
                               [None], **{"$schema": DRAFT_4}),
    "bounds of draft 4": _value({"type": "integer", "minimum": 0, "exclusiveMinimum": True, "maximum": 9}, 1, 9,
                                **{"$schema": DRAFT_4}),
    "dialect of 2019": _value(WORD, "a", **{"$schema": SCHEMA_2019}),
    "dialect of 2020": _value(WORD, "a", **{"$schema": SCHEMA_2020}),
    "zod": _of({"n": {"type": "number", "minimum": 0, "maximum": 9}}, {"n": 1}, additionalProperties=False,
               **{"$schema": DRAFT_7}),
    "nested": _value({"type": "object", "properties": {"w": WORD}, "required": ["w"], "additionalProperties": False},
                     {"w": "a"}),
    "optional": _open({"a": WORD, "b": {"type": "null"}}, {}, {"a": "x"}, {"a": "x", "b": None}),
    "nothing": ({"type": "object", "properties": {}}, [{}]),
    "anything": ({"type": "object"}, [{}, {"x": [1, {"y": None}]}]),
    "map": ({"type": "object", "additionalProperties": {"type": "boolean"}}, [{}, {"k": True}]),
    "map and more": ({"type": "object", "properties": {"a": WORD}, "required": ["a"],
                      "additionalProperties": {"type": "null"}}, [{"a": "x"}, {"a": "x", "b": None}]),
    "patternProperties": ({"type": "object", "patternProperties": {"^x_": {"type": "integer"}},
                           "additionalProperties": False}, [{}, {"x_a": 1}]),
    "maxProperties": ({"type": "object", "additionalProperties": {"type": "null"}, "maxProperties": 2}, [{"a": None}]),
    "$defs": _value({"$ref": "#/$defs/W"}, "a", **{"$defs": {"W": WORD}}),
    "definitions": _value({"$ref": "#/definitions/W"}, "a", definitions={"W": WORD}),
    "definitions of draft 7": _value({"$ref": "#/definitions/W"}, "a", definitions={"W": WORD},
                                     **{"$schema": DRAFT_7}),
    "a reference to a property": _of({"a": WORD, "b": {"$ref": "#/properties/a"}}, {"a": "x", "b": "y"}),
    "a reference to the root": ({"type": "object", "properties": {"n": {"enum": [1, 2]}, "next": _LEAF},
                                 "required": ["n"]}, [{"n": 1}, {"n": 1, "next": {"n": 2, "next": None}}]),
    "a list": _value({"$ref": "#/$defs/N"}, {"n": 1}, {"n": 1, "next": {"n": 2}}, **{"$defs": {"N": _NODE}}),
    "$anchor": _value({"$ref": "#word"}, "a", **{"$defs": {"W": {"$anchor": "word", **WORD}}}),
    "$id": _value({"$ref": "#/$defs/W"}, "a", **{"$defs": {"W": WORD}, "$id": "https://example.org/tool"}),
    "definitions in a chain": _value({"$ref": "#/$defs/A"}, "a", **{"$defs": {"A": {"$ref": "#/$defs/B"}, "B": WORD}}),
    "an escaped reference": _value({"$ref": "#/$defs/a~1b"}, "a", **{"$defs": {"a/b": WORD}}),
    "pydantic's optional": _open({"u": {"anyOf": [{"$ref": "#/$defs/U"}, {"type": "null"}], "default": None}},
                                 {"u": "C"}, {"u": None}, title="T", **{"$defs": {"U": {"enum": ["C", "F"]}}}),
    "pydantic's nested": _value({"type": "array", "items": {"$ref": "#/$defs/P"}, "maxItems": 2},
                                [], [{"x": 1, "y": 2}],
                                **{"$defs": {"P": {"type": "object", "title": "P", "properties": {
                                    "x": {"type": "integer", "title": "X"}, "y": {"type": "integer"}},
                                    "required": ["x", "y"]}}}),
    "a union": _value({"anyOf": [{"type": "integer"}, WORD]}, 1, "a"),
    "oneOf": _value({"oneOf": [_A, _B], "discriminator": {"propertyName": "t"}}, {"t": "a", "x": "w"}, {"t": "b"}),
    "allOf": _value({"allOf": [{"type": "number"}, {"minimum": 3}, {"maximum": 5}]}, 3, 4.5),
    "allOf of references": _value({"allOf": [{"$ref": "#/$defs/W"}]}, "a", **{"$defs": {"W": WORD}}),
    "a root with anyOf": ({"type": "object", "anyOf": [_A, _B]}, [{"t": "a"}, {"t": "b", "y": None}]),
    "a root with $ref": ({"$ref": "#/$defs/R", "$defs": {"R": _A}}, [{"t": "a"}]),
    "a root with $ref in draft 7": ({"$schema": DRAFT_7, "$ref": "#/definitions/R", "definitions": {"R": _A}},
                                    [{"t": "a", "x": "w"}]),
    "date": _value({"type": "string", "format": "date"}, "2024-02-29"),
    "date-time": _value({"type": "string", "format": "date-time"}, "2024-02-29T01:02:03Z"),
    "uuid": _value({"type": "string", "format": "uuid"}, "123e4567-e89b-12d3-a456-426614174000"),
    "int32": _value({"type": "integer", "format": "int32"}, -5, 2**31 - 1),
    "annotations": _value({**WORD, "title": "t", "description": "d", "default": "a", "examples": ["b"], "x-order": 1},
                          "a"),
    "names like keywords": _of({"enum": {"$ref": "#/definitions/W"}, "$ref": {"const": {"$ref": "#/x"}},
                                "properties": {"type": "null"}, "name": {"type": "null"}},
                               {"enum": "x", "$ref": {"$ref": "#/x"}, "properties": None, "name": None},
                               definitions={"W": WORD}),
    "a call's own keys": _of({"name": {"enum": ["f", "other"]}, "parameters": {"type": "object", "maxProperties": 0}},
                             {"name": "f", "parameters": {}}, {"name": "other", "parameters": {}}),
    "a call's keys and others": _of({"name": {"enum": ["f", "x"]}, "age": {"type": "integer", "minimum": 0}},
                                    {"name": "f", "age": 3}),
    "keys with arguments": _of({"name": {"enum": ["f"]}, "arguments": {"type": "object", "maxProperties": 0}},
                               {"name": "f", "arguments": {}}),
    "awkward keys": _of({'a"\\\n€': {"type": "null"}, "not": {"type": "null"}}, {'a"\\\n€': None, "not": None}),
    "texts like markers": _of({"text": {"enum": ["<tool_call>", "[TOOL_CALLS]", '{"name": "f", "parameters": {}}',
                                                 '<tool_call>{"name": "f", "arguments": {}}</tool_call>']}},
                              {"text": "<tool_call>"},
                              {"text": '<tool_call>{"name": "f", "arguments": {}}</tool_call>'}),
    "a call within": _value({"type": "object", "properties": {"name": {"const": "f"}, "parameters": {"const": {}}},
                             "required": ["name", "parameters"], "additionalProperties": False},
                            {"name": "f", "parameters": {}}),
}  # fmt: skip
