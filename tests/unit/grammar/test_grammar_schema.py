"""JSON Schema by keyword: enforced, so that every output validates; an annotation; or refused by name."""

import json
from contextlib import suppress

import jsonschema
import pytest
from octavo_engine.grammar import keywords
from octavo_engine.grammar.compiler import GrammarError
from octavo_engine.grammar.schema import SchemaBounds
from octavo_engine.grammar.source import GrammarSource
from octavo_engine.settings.records import MAX_GRAMMAR_BYTES
from octavo_engine.wire.errors import InvalidRequest
from octavo_engine.wire.structured import StructuredOutputs
from octavo_testing.grammars import BOUNDS, COMPILER, follow, random_output, state_of

DRAFT_7 = "http://json-schema.org/draft-07/schema#"
DRAFT_4 = "http://json-schema.org/draft-04/schema#"
NAME = {"type": "string", "maxLength": 3}
LARGE = SchemaBounds(max_bytes=MAX_GRAMMAR_BYTES, max_depth=64)


def closed(**properties):
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


ENFORCED = {
    "type list": {"type": ["integer", "null"], "maximum": 10, "minimum": 0},
    "no type": {"minimum": 3, "maximum": 9, "maxLength": 2, "maxItems": 1, "maxProperties": 0},
    "enum": {"enum": [1, "a", None, {"a": [1]}, 2.5]},
    "enum and type": {"enum": [1, "a", None], "type": ["string", "null"]},
    "enum and minimum": {"enum": [1, 5], "minimum": 3},
    "const": closed(version={"const": {"a": 1}}),
    "integers": {"type": "integer", "minimum": -5, "exclusiveMaximum": 1000, "multipleOf": 7},
    "numbers": {"type": "number", "exclusiveMinimum": 0.5, "maximum": 1.25},
    "multiples of a half": {"type": "number", "multipleOf": 0.5, "minimum": 0, "maximum": 3},
    "int32": {"type": "integer", "format": "int32"},
    "int64": {"type": "integer", "format": "int64"},
    "double": {"type": "number", "format": "double"},
    "lengths": {"type": "string", "minLength": 2, "maxLength": 4},
    "pattern": {"type": "string", "pattern": "^[a-f]+$", "minLength": 2, "maxLength": 4},
    "pattern and format": {"type": "string", "format": "date", "pattern": "^20"},
    "items": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
    "prefixItems": {"type": "array", "prefixItems": [NAME, {"type": "null"}], "items": False, "minItems": 1},
    "items by position": {
        "$schema": DRAFT_7, "type": "array", "items": [NAME], "additionalItems": False, "minItems": 1
    },
    "properties": closed(a=NAME, b={"type": "boolean"}),
    "optional": {"type": "object", "properties": {"a": NAME, "b": {"type": "null"}}, "additionalProperties": False},
    "additionalProperties": {"type": "object", "additionalProperties": {"type": "null"}, "maxProperties": 2},
    "patternProperties": {
        "type": "object", "patternProperties": {"^a": {"type": "integer", "maximum": 9}},
        "additionalProperties": {"type": "boolean"}, "minProperties": 1, "maxProperties": 2,
    },
    "anyOf": {"type": "string", "maxLength": 3, "anyOf": [{"minLength": 2}, {"pattern": "^b"}]},
    "oneOf": {"oneOf": [closed(t={"const": "a"}), closed(t={"const": "b"}, z={"type": "null"})]},
    "allOf": {"allOf": [{"type": "number"}, {"minimum": 3}, {"maximum": 4.5}]},
    "$ref": {"$ref": "#/$defs/x", "minLength": 2, "$defs": {"x": NAME}},
    "$ref to definitions": {"$schema": DRAFT_7, "$ref": "#/definitions/x", "definitions": {"x": NAME}},
    "$anchor": {"$ref": "#x", "$defs": {"y": {"$anchor": "x", **NAME}}},
    "recursion": closed(next={"anyOf": [{"$ref": "#"}, {"type": "null"}]}),
    "draft 4": {"$schema": DRAFT_4, "type": "integer", "minimum": 3, "maximum": 5, "exclusiveMinimum": True},
    "awkward keys": closed(**{'a"\\\n\N{EURO SIGN}': {"type": "null"}, "not": {"type": "null"}}),
    **{f"format {name}": {"type": "string", "format": name, "maxLength": 60}
       for name in ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")},
}  # fmt: skip


def source(schema, bounds=BOUNDS, **options):
    return GrammarSource(bounds).grammar_for(StructuredOutputs(json=schema, **options))


@pytest.mark.parametrize("schema", ENFORCED.values(), ids=ENFORCED)
def test_every_output_of_the_grammar_validates(schema):
    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    kind.check_schema(schema)
    validator = kind(schema, format_checker=kind.FORMAT_CHECKER)
    state = state_of(json=schema)
    outputs = [text for seed in range(40) if (text := random_output(state, seed)) is not None]
    assert outputs
    for text in outputs:
        validator.validate(json.loads(text))


REFUSED = {
    "not": ({"properties": {"a": {"not": {}}}}, "#/properties/a/not"),
    "if": ({"if": {}, "then": {}}, "#/if"),
    "uniqueItems": ({"type": "array", "uniqueItems": True}, "#/uniqueItems"),
    "contains": ({"items": {"contains": {}}}, "#/items/contains"),
    "minContains": ({"minContains": 1}, "#/minContains"),
    "propertyNames": ({"anyOf": [{}, {"propertyNames": {}}]}, "#/anyOf/1/propertyNames"),
    "dependentRequired": ({"dependentRequired": {}}, "#/dependentRequired"),
    "dependentSchemas": ({"dependentSchemas": {}}, "#/dependentSchemas"),
    "dependencies": ({"$defs": {"x": {"dependencies": {}}}}, "#/$defs/x/dependencies"),
    "unevaluatedProperties": ({"unevaluatedProperties": False}, "#/unevaluatedProperties"),
    "$dynamicRef": ({"$dynamicRef": "#x"}, "#/$dynamicRef"),
    "$recursiveRef": ({"$recursiveRef": "#"}, "#/$recursiveRef"),
    "contentEncoding": ({"type": "string", "contentEncoding": "base64"}, "#/contentEncoding"),
    "nullable": ({"type": "string", "nullable": True}, "#/nullable"),
    "a mistyped one": ({"type": "string", "maxLenght": 3}, "#/maxLenght"),
    "x-guidance": ({"x-guidance": {"lenient": True}, "not": {}}, "#/x-guidance"),
    "an unknown format": ({"type": "string", "format": "colour"}, "#/format"),
    "a format of another type": ({"type": "integer", "format": "date"}, "#/format"),
    "an unknown dialect": ({"$schema": "http://example.org/mine"}, "#/$schema"),
    "a dialect within": ({"items": {"$schema": DRAFT_7}}, "#/items/$schema"),
    "additionalItems now": ({"prefixItems": [{}], "additionalItems": False}, "#/additionalItems"),
    "prefixItems then": ({"$schema": DRAFT_7, "prefixItems": [{}]}, "#/prefixItems"),
    "items by position now": ({"items": [{}]}, "#/items"),
    "minProperties": ({"type": "object", "minProperties": 2}, "#/minProperties"),
    "a reference to itself": ({"$ref": "#"}, "#"),
    "a circle": ({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"anyOf": [{"$ref": "#/$defs/a"}]}}}, "#/$defs/a"),
    "a circle by an anchor": ({"$defs": {"a": {"$anchor": "x", "allOf": [{"$ref": "#x"}]}}}, "#/$defs/a/allOf/0"),
    "patterns without end": ({"allOf": [{"pattern": f"a.{{{i}}}b"} for i in range(30)]}, "#"),
    "patterns by references": (
        {"$defs": {str(i): {"pattern": f"{i}.*", "$ref": f"#/$defs/{i + 1}"} for i in range(30)} | {"30": {}}},
        "#/$defs/0",
    ),
    "a long chain": ({"$defs": {str(i): {"$ref": f"#/$defs/{i + 1}"} for i in range(200)} | {"200": {}}}, "#/$defs/0"),
    "an $id within": ({"items": {"$id": "x"}}, "#/items/$id"),
    "a schema of the wrong type": ({"properties": {"a": 1}}, "#/properties/a"),
    "properties of the wrong type": ({"properties": []}, "#/properties"),
    "oneOf that overlap": ({"items": {"oneOf": [{"type": "number"}, {"type": "integer"}]}}, "#/items"),
    "an impossible range": ({"type": "integer", "minimum": 3, "maximum": 1}, "#"),
    "a pattern that looks ahead": ({"items": {"type": "string", "pattern": "(?=a)b"}}, "#/items"),
    "a type nobody knows": ({"properties": {"a": {"type": "text"}}}, "#/properties/a"),
    "a missing reference": ({"$ref": "#/$defs/none"}, "#"),
    "a reference elsewhere": ({"$ref": "https://example.org/schema.json"}, "#/$ref"),
}


@pytest.mark.parametrize(("schema", "place"), REFUSED.values(), ids=REFUSED)
def test_an_unenforceable_keyword_is_refused_by_place(schema, place):
    with pytest.raises(InvalidRequest) as caught:
        source(schema)
    assert f"{place}:" in str(caught.value)
    assert caught.value.param == "structured_outputs.json"


def assert_refused(text, place):
    for schema in (text, json.loads(text)):
        with pytest.raises(InvalidRequest) as caught:
            source(schema)
        assert f"{place}:" in str(caught.value)
        assert caught.value.param == "structured_outputs.json"


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e400", "9" * 400, "-" + "9" * 400])
@pytest.mark.parametrize("keyword", ["const", "maximum", "default"])
def test_a_number_that_only_python_reads_is_refused_with_its_place(keyword, number):
    text = f'{{"properties": {{"a": {{"type": "integer", "{keyword}": {number}}}}}}}'
    assert_refused(text, f"#/properties/a/{keyword}")


#: Schemas in which the library overflowed its stack at an integer without a negative, or refused it without its place.
FATAL = {
    "const": ('{"properties": {"a": {"type": "integer", "const": N}}}', "#/properties/a/const"),
    "enum": ('{"enum": [1, N], "type": ["null", "integer"]}', "#/enum/1"),
    "a constant inside of another": ('{"const": {"a": [N]}, "title": "integer"}', "#/const/a/0"),
    "a type by allOf": ('{"allOf": [{"const": N}, {"type": "integer"}]}', "#/allOf/0/const"),
    "a type by $ref": ('{"$ref": "#/$defs/a", "const": N, "$defs": {"a": {"type": "\\u0069nteger"}}}', "#/const"),
    "a property with a keyword's name": ('{"properties": {"default": {"const": N, "type": "integer"}}}',
                                         "#/properties/default/const"),
    "minimum": ('{"type": "number", "minimum": N}', "#/minimum"),
    "exclusiveMaximum": ('{"exclusiveMaximum": N}', "#/exclusiveMaximum"),
}  # fmt: skip


@pytest.mark.parametrize("number", ["-1e300", "-1e20", str(-(2**63)), str(-(2**63) + 1), str(-(2**70))])
@pytest.mark.parametrize(("schema", "place"), FATAL.values(), ids=FATAL)
def test_an_integer_without_a_negative_is_refused(schema, place, number):
    assert_refused(schema.replace("N", number), place)


@pytest.mark.parametrize("schema", ['{"const": N}', '{"enum": [N, 1], "type": "number"}', '{"const": {"a": [N]}}'])
def test_the_lowest_integers_are_refused_without_a_type(schema):
    for number in (-(2**63), -(2**63) + 1):
        with pytest.raises(InvalidRequest, match="is not supported"):
            source(schema.replace("N", str(number)))


def test_a_reference_into_an_annotation_reaches_no_unchecked_constant():
    for place in ("default", "enum/0"):
        schema = {"$ref": f"#/{place}", "default": {"const": -(2**63)}, "enum": [{"const": -(2**63)}]}
        with pytest.raises(InvalidRequest):
            source(schema)


@pytest.mark.parametrize("number", ["-1e30", "-1e20", str(-(2**63)), str(-(2**70)), str(2**70), "1e30"])
@pytest.mark.parametrize("keyword", ["default", "examples", "example", "x-bound"])
def test_an_annotation_may_have_any_number(keyword, number):
    for kind in ("integer", "number"):
        COMPILER.get(source(f'{{"properties": {{"a": {{"type": "{kind}", "{keyword}": [{number}]}}}}}}'))


@pytest.mark.parametrize(
    "number", [-(2**63) + 1024, -(2**63) - 1, -1e20, -1e30, 2**63 - 1, 2**64, 10**30, 1.5e308, -5e-324]
)
def test_a_number_that_the_library_reads_is_accepted(number):
    follow(state_of(json={"const": number}), "-" if number < 0 else str(number)[0])


@pytest.mark.parametrize(
    "link",
    [
        lambda target: {"properties": {"a": target}},
        lambda target: {"items": {"items": target}},
        lambda target: {"additionalProperties": target},
        lambda target: {"anyOf": [{"type": "null"}, {"type": "array", "items": target}]},
        lambda target: {"allOf": [{"items": target}, {"items": target}]},
    ],
)
def test_a_long_chain_of_references_does_not_end_the_process(link):
    """The library overflowed a stack of 8 MiB at 250 to 1100 references."""
    chain = {f"d{i}": link({"$ref": f"#/$defs/d{i + 1}"}) for i in range(1500)}
    with suppress(InvalidRequest, GrammarError):
        COMPILER.get(source({"$ref": "#/$defs/d0", "$defs": {**chain, "d1500": {}}}, LARGE))


@pytest.mark.parametrize("keyword", sorted(keywords.ALL))
def test_a_value_of_a_wrong_type_is_an_invalid_request(keyword):
    for value in (None, True, -1, 1.5, "", "#", [], [1], ["a", {}], {}, {"a": 1}, {"a": {}}, 2**70, 1e300, "\ud800"):
        member = {"type": "object", "properties": {"a": {keyword: value}}, "required": ["a"]}
        for schema in ({keyword: value}, {"format": "date", keyword: value}, member):
            with suppress(InvalidRequest):
                source(schema, disable_additional_properties=True)


def test_a_mistyped_keyword_gets_a_hint():
    with pytest.raises(InvalidRequest, match="did you mean 'maxLength'"):
        source({"maxLenght": 3})


def test_annotations_have_no_effect():
    described = {
        "title": "t", "description": "d", "default": 1, "examples": [1], "$comment": "c", "deprecated": True,
        "readOnly": True, "writeOnly": False, "x-order": 1, "type": "integer",
    }  # fmt: skip
    assert random_output(state_of(json=described), 1)


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ("{", "not JSON"),
        ({"const": object()}, "not JSON"),
        ("[1]", "must be a JSON object, got list"),
        ({"description": "x" * 20_000}, "the limit is 20000"),
        ({"enum": [json.loads("[" * 70 + "]" * 70)]}, "the limit is 64"),
        ("[" * 5_000, "not JSON"),
        ('{"const": "\\ud800"}', "lone surrogate"),
        ({"const": "\ud800"}, "lone surrogate"),
    ],
)
def test_a_schema_beyond_the_bounds_is_refused(schema, message):
    with pytest.raises(InvalidRequest, match=message):
        source(schema)


def test_the_bounds_are_configurable():
    with pytest.raises(InvalidRequest, match="2 levels deep; the limit is 1"):
        source({"items": {}}, SchemaBounds(max_bytes=100, max_depth=1))


def test_a_key_has_one_spelling():
    """Otherwise a second "a", spelt with an escape, would be an additional property of any type."""
    state = state_of(json={"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})
    with pytest.raises(AssertionError):
        follow(state, '{"a":1,"\\u0061":"x"}')
    with pytest.raises(AssertionError):
        follow(state, '{"a":1,"a":"x"}')


@pytest.mark.parametrize(
    ("options", "good", "bad"),
    [
        ({}, '{ "a" : 1\n}', '{  "a":1}'),
        ({"disable_any_whitespace": True}, '{"a":1}', '{"a": 1}'),
        ({"whitespace_pattern": "\\t?"}, '{\t"a":1}', '{ "a":1}'),
    ],
)
def test_whitespace_between_tokens_follows_the_options(options, good, bad):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    follow(state_of(json=schema, **options), good)
    with pytest.raises(AssertionError):
        follow(state_of(json=schema, **options), bad)


def test_properties_may_be_closed_from_outside():
    schema = {"type": "object", "properties": {"a": {"type": "object", "properties": {}}}}
    follow(state_of(json=schema), '{"b":1')
    for text in ('{"b":1', '{"a":{"c":1'):
        with pytest.raises(AssertionError):
            follow(state_of(json=schema, disable_additional_properties=True), text)
