"""The real model with schemas of the benchmark, at temperature 1: every finished answer matches its schema."""

import json

import jsonschema
import pytest
from octavo_engine import LLM, SamplingParams, StructuredOutputs

pytestmark = [pytest.mark.real_model, pytest.mark.slow]

SCHEMAS = [
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 12},
            "born": {"type": "string", "format": "date"},
            "likes": {"type": "array", "items": {"enum": ["tea", "jazz"]}, "maxItems": 2},
        },
        "required": ["name", "born", "likes"],
        "additionalProperties": False,
    },
    {"anyOf": [{"type": "integer", "minimum": 0, "maximum": 99}, {"type": "null"}]},
    {
        "$ref": "#/$defs/p",
        "$defs": {"p": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 3}},
    },
]


def test_every_finished_answer_matches_its_schema():
    llm = LLM(max_model_len=512, num_gpu_blocks_override=256)
    messages = [[{"role": "user", "content": "Answer with JSON about anyone."}] for _ in SCHEMAS * 2]
    params = [
        SamplingParams(temperature=1, seed=seed, max_tokens=200, structured_outputs=StructuredOutputs(json=schema))
        for seed, schema in enumerate(SCHEMAS * 2)
    ]
    outputs = llm.chat(messages, params, use_tqdm=False)
    llm.shutdown()
    assert [output.outputs[0].finish_reason for output in outputs] == ["stop"] * len(params)
    for output, schema in zip(outputs, SCHEMAS * 2, strict=True):
        checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
        jsonschema.Draft202012Validator(schema, format_checker=checker).validate(json.loads(output.outputs[0].text))
