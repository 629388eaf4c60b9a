"""Every field that requests a structured output gives the same result."""

import pytest
from octavo_engine.wire.errors import InvalidRequest
from octavo_engine.wire.structured import StructuredOutputs
from octavo_server.openai.completion import CompletionRequest
from pydantic import ValidationError

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}}


def request(**fields):
    return CompletionRequest.model_validate({"prompt": "p", **fields})


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"response_format": {"type": "json_object"}}, {"json_object": True}),
        (
            {"response_format": {"type": "json_object", "schema": SCHEMA}},
            {"json": SCHEMA, "place": "response_format.schema"},
        ),
        ({"response_format": JSON_SCHEMA}, {"json": SCHEMA, "place": "response_format.json_schema.schema"}),
        ({"structured_outputs": {"json": SCHEMA}}, {"json": SCHEMA}),
        ({"structured_outputs": {"json": "{}", "disable_any_whitespace": True}}, None),
        ({"structured_outputs": {"regex": "a+", "disable_fallback": True}}, {"regex": "a+"}),
        ({"structured_outputs": {"choice": ["a", "b"], "regex": None}}, {"choice": ["a", "b"]}),
        ({"structured_outputs": {"grammar": 'root ::= "a"'}}, {"grammar": 'root ::= "a"'}),
        ({"structured_outputs": {"json_object": True}}, {"json_object": True}),
        ({"guided_json": SCHEMA, "response_format": {"type": "text"}}, {"json": SCHEMA, "place": "guided_json"}),
        ({"guided_json": "{}", "guided_decoding_backend": "outlines"}, {"json": "{}", "place": "guided_json"}),
        ({"guided_regex": "a+"}, {"regex": "a+", "place": "guided_regex"}),
        ({"guided_choice": ["a"]}, {"choice": ["a"], "place": "guided_choice"}),
        ({"guided_grammar": "start: A"}, {"grammar": "start: A", "place": "guided_grammar"}),
        ({"guided_json_object": True}, {"json_object": True, "place": "guided_json_object"}),
        (
            {"guided_json": SCHEMA, "guided_whitespace_pattern": " ?"},
            {"json": SCHEMA, "whitespace_pattern": " ?", "place": "guided_json"},
        ),
    ],
)
def test_each_field_gives_the_structured_output(fields, expected):
    expected = expected or {"json": "{}", "disable_any_whitespace": True}
    params = request(**fields).sampling_params({}, max_tokens=8, logprobs=None)
    assert params.structured_outputs == StructuredOutputs(**expected)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"response_format": None},
        {"response_format": {"type": "text"}},
        {"guided_json_object": False},
        {"structured_outputs": {}},
    ],
)
def test_body_without_a_request_gives_none(fields):
    assert request(**fields).shape() is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.schema"),
        ({"response_format": JSON_SCHEMA, "guided_regex": "a"}, "guided_regex"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
        ({"guided_choice": []}, "structured_outputs.choice"),
    ],
)
def test_error_names_a_wrong_field(fields, param):
    with pytest.raises(InvalidRequest) as caught:
        request(**fields).shape()
    assert caught.value.param == param


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "structural_tag"}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": "{}"}}},
        {"structured_outputs": {"structural_tag": "x"}},
        {"guided_choice": "a"},
    ],
)
def test_unknown_types_are_rejected(fields):
    with pytest.raises(ValidationError):
        request(**fields)
