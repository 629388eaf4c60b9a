"""Random schemas, grammars, patterns and templates' values in every field that takes them: no 5xx, and no crash.

The tiny model writes at most four tokens, so nearly all the work is that of the libraries of grammars and templates.
"""

import asyncio
import json
import random

import pytest
from octavo_engine.grammar import keywords
from octavo_testing.fuzz_requests import FuzzRequest
from octavo_testing.fuzz_run import Report, send_all
from octavo_testing.fuzz_values import FLOATS, GRAMMARS, INTS, PATTERNS, SCHEMAS, nasty

pytestmark = pytest.mark.slow

SEED = 20261127
NUM_REQUESTS = 2000
TYPES = ("string", "integer", "number", "object", "array", "null", "boolean", ["string", "null"])
PIECES = (
    *(
        "start:",
        "root",
        "::=",
        "A:",
        "A",
        "b",
        "\n",
        '"a"',
        '"&"',
        "/a+/",
        "&",
        "|",
        "(",
        ")",
        "[",
        "]",
        "[a-z]",
        "*",
        "?",
    ),
    *(
        "{1,3}",
        "{3,1}",
        "~",
        "%ignore",
        "%json",
        "%regex",
        "{",
        "}",
        "<x>",
        "<[5]>",
        "@a",
        "//c",
        "#",
        "\\",
        "..",
        "->",
    ),
)
PATHS = {
    "/v1/completions": {"prompt": "abc", "max_tokens": 4},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4},
    "/v1/responses": {"input": "hi", "max_output_tokens": 4},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4},
}


def schema(dice, depth=0):
    """Return keywords of JSON Schema, most with values of the right kind."""
    if dice.random() < 0.1:
        return dice.choice(SCHEMAS)
    made = {"type": dice.choice(TYPES)} if dice.random() < 0.7 else {}
    for keyword in dice.sample(sorted(keywords.ALL), dice.randint(0, 4)):
        child = schema(dice, depth + 1) if depth < 4 else {}
        kinds = (keywords.NAMED_SCHEMAS, keywords.LISTS_OF_SCHEMAS, keywords.ONE_SCHEMA)
        values = ({"a": child, "é": {}}, [child, {}], child, dice.choice((*INTS, *FLOATS, *PATTERNS)))
        known = next((value for kind, value in zip(kinds, values, strict=False) if keyword in kind), values[-1])
        made[keyword] = known if dice.random() < 0.8 else nasty(dice)
    return made


def grammar(dice):
    if dice.random() < 0.1:
        return dice.choice(GRAMMARS)
    return dice.choice(("start: ", "root ::= ", "")) + " ".join(dice.choices(PIECES, k=dice.randint(1, 15)))


def fields(dice, path):
    """Return fields with one odd shape, as the body of the path takes them."""
    odd = schema(dice)
    if path == "/v1/messages":
        tool = {"tools": [{"name": "f", "input_schema": odd}], "tool_choice": {"type": "any"}}
        return dice.choice((tool, {"output_config": {"format": {"type": "json_schema", "schema": odd}}}))
    outputs = [{"json": odd}, {"json": json.dumps(odd)}, {"regex": dice.choice(PATTERNS)}, {"grammar": grammar(dice)}]
    shapes = [{"structured_outputs": shape} for shape in outputs]
    if path == "/v1/responses":
        shapes += [{"text": {"format": {"type": "json_schema", "name": "s", "schema": odd}}}]
        shapes += [{"tools": [{"type": "function", "name": "f", "parameters": odd}], "tool_choice": "required"}]
        return dice.choice(shapes) | dice.choice(({}, {"truncation": "auto", "reasoning": {"effort": "none"}}))
    shapes += [{"guided_json": odd, "guided_whitespace_pattern": dice.choice(PATTERNS)}]
    if path == "/v1/chat/completions":
        shapes += [
            {"chat_template_kwargs": nasty(dice)},
            {"reasoning_effort": "none", "chat_template_kwargs": {"a": odd}},
        ]
        shapes += [
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": odd}}], "tool_choice": "required"}
        ]
    return dice.choice(shapes)


def requests(dice):
    for _ in range(NUM_REQUESTS):
        path = dice.choice([*PATHS])
        body = json.dumps({**PATHS[path], **fields(dice, path), "stream": dice.random() < 0.5})
        data = body.encode("utf-8", "surrogatepass")
        lines = (f"POST {path} HTTP/1.1", "Host: localhost", "Connection: close", "Content-Type: application/json")
        head = "\r\n".join([*lines, f"Content-Length: {len(data)}"]).encode()
        yield FuzzRequest(kind=path, path=path, payload=head + b"\r\n\r\n" + data)


def test_no_odd_grammar_breaks_the_server(tiny):
    report = Report()
    asyncio.run(send_all(tiny.url, requests(random.Random(SEED)), report))
    print(dict(report.statuses), dict(report.kinds))
    assert not report.faults, "\n".join(report.faults[:5])
    assert sum(report.statuses.values()) == NUM_REQUESTS
    assert min(report.statuses["200"], report.statuses["400"]) > NUM_REQUESTS // 20
    assert tiny.process.process.poll() is None
    assert tiny.http.post("/v1/completions", json={"prompt": "still there?", "max_tokens": 2}).status_code == 200
