"""Structured output over HTTP, from a real server with a tiny random model, in every field that requests it."""

import json
import re

import httpx
import pytest
from octavo_testing.scripted import write_byte_model
from octavo_testing.serve_command import octavo_serve
from openai import BadRequestError, OpenAI
from pydantic import BaseModel, Field

TINY = ("--load-format", "dummy", "--dtype", "float32", "--max-model-len", "256", "--num-threads", "1")
SCHEMA = {
    "type": "object",
    "properties": {"size": {"type": "integer", "minimum": 10, "maximum": 99}},
    "required": ["size"],
    "additionalProperties": False,
}
NUMBER = re.compile(r"\s*\{\s*\"size\"\s*:\s*[0-9]{2}\s*\}")
HELLO = [{"role": "user", "content": "Hello"}]
DRAFT_7 = "http://json-schema.org/draft-07/schema#"


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    model = str(write_byte_model(folder, more_special_tokens=("<tool_call>", "</tool_call>")))
    tools = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
    with octavo_serve(folder, model, *TINY, *tools, "--max-schema-bytes", "2000") as serving:
        yield serving.url


@pytest.fixture(scope="module")
def client(url):
    with OpenAI(base_url=f"{url}/v1", api_key="none") as made:
        yield made


def complete(url, **fields):
    body = {"prompt": "Say it:", "max_tokens": 150, **fields}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=240)


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"structured_outputs": {"json": SCHEMA}}, NUMBER),
        ({"guided_json": json.dumps(SCHEMA)}, NUMBER),
        ({"guided_json": SCHEMA, "guided_whitespace_pattern": "\\t"}, re.compile(r"\t?{\t?\"size\"\t?:\t?\d\d\t?}\t?")),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}}, NUMBER),
        ({"structured_outputs": {"regex": "[ab]{3}"}}, re.compile("[ab]{3}")),
        ({"guided_regex": "[ab]{3}"}, re.compile("[ab]{3}")),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, re.compile("yes|no")),
        ({"guided_choice": ["yes", "no"]}, re.compile("yes|no")),
        ({"structured_outputs": {"grammar": 'root ::= "x" [0-9]'}}, re.compile("x[0-9]")),
        ({"guided_grammar": 'start: "x" /[0-9]/'}, re.compile("x[0-9]")),
    ],
)
def test_completions_accept_every_field_for_structured_output(url, fields, pattern):
    answer = complete(url, **fields)
    assert answer.status_code == 200, answer.text
    choice = answer.json()["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert pattern.fullmatch(choice["text"])


def test_openai_client_parses_a_pydantic_model(client):
    class Box(BaseModel):
        size: int = Field(ge=10, le=99)
        colour: str = Field(max_length=5)

    answer = client.chat.completions.parse(model="", messages=HELLO, response_format=Box, max_tokens=200, seed=1)
    box = answer.choices[0].message.parsed
    assert isinstance(box, Box)
    assert 10 <= box.size <= 99


def test_stream_and_several_choices_follow_the_schema(client):
    stream = client.chat.completions.create(
        model="", messages=HELLO, n=3, stream=True, max_tokens=60, seed=2, extra_body={"guided_regex": "[a-d]{5}"}
    )
    texts, reasons = ["", "", ""], set()
    for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            reasons |= {choice.finish_reason} - {None}
    assert reasons == {"stop"}
    assert all(re.fullmatch("[a-d]{5}", text) for text in texts)
    assert len(set(texts)) > 1


def test_logprobs_of_forbidden_tokens_are_numbers(client):
    answer = client.chat.completions.create(
        model="", messages=HELLO, logprobs=True, top_logprobs=4, max_tokens=9, extra_body={"guided_choice": ["a", "b"]}
    )
    tops = answer.choices[0].logprobs.content[0].top_logprobs
    assert len(tops) == 4
    assert min(top.logprob for top in tops) < -100


@pytest.mark.parametrize(("choice", "liked"), [("auto", "<tool_call>"), ("auto", "{"), ("required", "{")])
def test_tools_beside_a_format_give_valid_calls_or_json(client, url, choice, liked):
    """A bias decides between calls and JSON; all else is random, so only the grammar makes the answer valid."""
    tool = {"type": "function", "function": {"name": "put", "parameters": {"$schema": DRAFT_7, **SCHEMA}}}
    other = {"type": "function", "function": {"name": "get", "parameters": {"type": "object", "maxProperties": 0}}}
    asked = httpx.post(f"{url}/tokenize", json={"prompt": liked, "add_special_tokens": False}, timeout=240).json()
    for seed in range(3):
        answer = client.chat.completions.create(
            model="", messages=HELLO, max_tokens=200, seed=seed, tools=[tool, other], tool_choice=choice,
            response_format={"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}},
            parallel_tool_calls=False, logit_bias={str(i): 50 for i in asked["tokens"]},
        ).choices[0]  # fmt: skip
        if liked == "{" and choice == "auto":
            assert (answer.finish_reason, answer.message.tool_calls) == ("stop", None)
            assert NUMBER.fullmatch(answer.message.content)
        else:
            (call,) = answer.message.tool_calls
            assert (answer.finish_reason, answer.message.content) == ("tool_calls", None)
            assert (NUMBER if call.function.name == "put" else re.compile(r"{\s*}")).fullmatch(call.function.arguments)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"guided_json": {"properties": {"a": {"not": {}}}}}, "guided_json", "#/properties/a/not"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}},
            "response_format.json_schema.schema",
            "#/not",
        ),
        ({"response_format": {"type": "json_object", "schema": {"not": {}}}}, "response_format.schema", "#/not"),
        ({"structured_outputs": {"json": {"not": {}}}}, "structured_outputs.json", "#/not"),
        ({"guided_json": {"description": "x" * 3000}}, "guided_json", "--max-schema-bytes"),
        ({"guided_regex": "(a"}, "guided_regex", "unclosed group"),
        ({"guided_grammar": "root ::= x"}, "guided_grammar", "not found"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag", "Extra inputs"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "json_schema"),
    ],
)
def test_unenforceable_schema_gives_a_400_that_names_it(url, fields, param, words, stream):
    answer = complete(url, stream=stream, **fields)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == param
    assert words in error["message"]


def test_openai_client_raises_for_a_bad_schema(client):
    schema = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "array", "uniqueItems": True}}}
    with pytest.raises(BadRequestError, match="uniqueItems"):
        client.chat.completions.create(model="", messages=HELLO, response_format=schema)


def test_render_endpoint_checks_the_structured_output(url):
    body = {"prompt": "x", "guided_regex": "(a"}
    assert httpx.post(f"{url}/v1/completions/render", json=body, timeout=240).status_code == 400
