"""`StructuredOutputs`: exactly one shape of the right type, which survives msgpack and a trace."""

import msgspec
import pytest
from octavo_engine.core.trace import decode_request
from octavo_engine.wire.errors import InvalidRequest
from octavo_engine.wire.records import EngineRequest
from octavo_engine.wire.sampling import SamplingParams
from octavo_engine.wire.structured import StructuredOutputs

SHAPES = [
    {"json": {"type": "object", "properties": {"a": {"enum": [1, None, "x"]}}}},
    {"json": '{"type": "object"}'},
    {"json": {}},
    {"regex": "a+"},
    {"choice": ["yes", "no"]},
    {"grammar": 'root ::= "a"'},
    {"json_object": True, "whitespace_pattern": " "},
    {"json_object": True, "disable_any_whitespace": True, "disable_additional_properties": True},
]


@pytest.mark.parametrize("fields", SHAPES)
def test_a_shape_survives_msgpack(fields):
    request = EngineRequest(
        request_id="r", prompt_token_ids=[1], params=SamplingParams(structured_outputs=StructuredOutputs(**fields))
    )
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(request), type=EngineRequest)
    assert sent == request


@pytest.mark.parametrize("fields", SHAPES)
def test_a_shape_survives_a_trace(fields):
    entry = {"request_id": "r", "prompt_token_ids": [1], "params": {"structured_outputs": fields}}
    assert decode_request(entry).params.structured_outputs == StructuredOutputs(**fields)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "structured_outputs"),
        ({"json_object": False}, "structured_outputs"),
        ({"regex": "a", "choice": ["a"]}, "structured_outputs"),
        ({"json": 3}, "structured_outputs.json"),
        ({"regex": ""}, "structured_outputs.regex"),
        ({"grammar": 1}, "structured_outputs.grammar"),
        ({"choice": []}, "structured_outputs.choice"),
        ({"choice": [""]}, "structured_outputs.choice"),
        ({"choice": ["a", 1]}, "structured_outputs.choice"),
        ({"json": {}, "whitespace_pattern": ""}, "structured_outputs.whitespace_pattern"),
        (
            {"json": {}, "whitespace_pattern": " ", "disable_any_whitespace": True},
            "structured_outputs.whitespace_pattern",
        ),
    ],
)
def test_an_invalid_shape_is_refused_by_field(fields, param):
    with pytest.raises(InvalidRequest) as caught:
        StructuredOutputs(**fields)
    assert caught.value.param == param


def test_a_structural_tag_is_refused_by_name() -> None:
    with pytest.raises(InvalidRequest) as caught:
        StructuredOutputs(structural_tag="{}")
    assert caught.value.param == "structured_outputs.structural_tag"
