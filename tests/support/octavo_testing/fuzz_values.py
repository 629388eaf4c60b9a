"""Random values and bodies that no client should send; the same seed gives the same ones.

Bodies with invalid JSON are put together by hand: duplicate keys, depths beyond any recursion limit, numbers beyond any
type, text in other encodings.
"""

import json
import random
from collections.abc import Callable
from typing import Any

Json = Any

INTS = (
    *(0, 1, -1, 2, 3, 5, 63, 64, 65, 255, 256, 259, 1000, 2**31 - 1, 2**31, -(2**31)),
    *(2**53 + 1, 2**63 - 1, 2**63, -(2**63), 2**64, 10**30, 10**400),
)
FLOATS = (0.0, -0.0, 5e-324, 1e-9, 0.5, 1.0, 1.5, 2.0, 2.0000001, -1.0, 1e38, 1e308, float("nan"), float("inf"))
TEXTS = (
    *("", " ", "a", "\x00", "\n\r\t", "\ud800", "\udfff\ud800", "é", "日本語", "👩‍🚀", "\u202e", "\ufeff", "\ufffd"),
    *("none", "auto", "required", "text", "json_object", "json_schema", "true", "1", "1e5", "null", "NaN", "-1"),
    *("<|im_start|>", "<|im_end|>", "<|endoftext|>", "{{ 7 * 7 }}", "{% for x in range(10**9) %}{% endfor %}"),
    *("tiny", "../../etc/passwd", "'; DROP TABLE", "a" * 5000, "\ud83d" * 50, "e\u0301" * 300),
)
#: Valid schemas, meaningless ones, and ones that would cost a careless compiler hours.
SCHEMAS: tuple[Json, ...] = (
    *({}, {"type": "object"}, {"type": "string"}, {"enum": [1, "a", None]}, {"type": ["string", "null"]}, True, False),
    *({"type": "nothing"}, {"$ref": "#"}, {"$ref": "#/nowhere"}, {"$ref": "http://127.0.0.1:1/x"}, {"type": 7}),
    *({"type": "string", "pattern": "(a|a)*b"}, {"type": "string", "pattern": "("}, {"pattern": "\\p{L}"}),
    *({"type": "string", "minLength": 10**9}, {"type": "array", "minItems": 10**9}, {"type": "array", "maxItems": -1}),
    *({"type": "integer", "minimum": 10**40, "maximum": -(10**40)}, {"multipleOf": 0}, {"const": "\ud800"}),
    *({"not": {}}, {"oneOf": []}, {"anyOf": []}, {"allOf": [{"type": "string"}, {"type": "integer"}]}, {"enum": []}),
    *({"properties": {"a": {"$ref": "#/$defs/b"}}, "$defs": {"b": {"$ref": "#/$defs/b"}}}, {"properties": []}),
    {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(300)}},
    {"anyOf": [{"type": "object", "required": [f"p{i}"]} for i in range(200)]},
    *({"maximum": float("nan")}, {"type": "number", "const": 10**400}, {"type": "integer", "const": -(2**63)}),
    *({"format": "date", "type": 1e308}, {"enum": [float("inf")]}, {"type": "integer", "const": -1e300}),
    {"$ref": "#/$defs/0", "$defs": {str(i): {"items": {"$ref": f"#/$defs/{i + 1}"}} for i in range(1500)}},
)
PATTERNS = (
    "a+",
    "(",
    "[",
    "a{1000}{1000}",
    "(a*)*b",
    "\\",
    "(?=a)",
    "\\1",
    "[^\\x00-\\uffff]",
    "x{10000000}",
    "",
    "(?i)A",
)
GRAMMARS = (
    'root ::= "a"',
    "root ::= root",
    "root ::= ",
    'start: "a"',
    "start: start",
    "%",
    "",
    "root ::= (root root)*",
    "root ::= " + " | ".join(f'"&{i};"' for i in range(20)),
    "\n".join(["start: r0", *(f"r{i}: r{i + 1}" for i in range(7000)), 'r7000: "a"']),
    'start: "a"' + " & A" * 20,
)
FUNCTIONS: tuple[Json, ...] = (
    {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}},
    {"type": "function", "function": {"name": "", "parameters": []}},
    {"type": "function", "function": {"name": "f" * 500}},
    *({"type": "retrieval"}, {"function": None}, {}, "f", None),
)
#: Field name -> values that clients often send, valid or not.
PLAUSIBLE: dict[str, tuple[Json, ...]] = {
    "prompt": ("abc", [65, 66], ["a", "b"], [[65], [66]], [[]], ["", ""], [65, "a"], ["a"] * 40, [65] * 63, [65] * 64),
    "messages": (
        [{"role": "user", "content": None}],
        [{"role": "user", "content": [{"type": "text", "text": "\ud800"}]}],
        [{"role": "tool", "content": "x", "tool_call_id": 7}],
        [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
        [{"role": "\x00", "content": "hi"}] * 50,
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]}],
    ),
    "input": ("hi", [{"role": "user", "content": "hi"}], [{"type": "function_call_output", "call_id": "x"}], [[]]),
    "response_format": (
        *({"type": "json_object"}, {"type": "text"}, {"type": "json_schema"}, {"type": "grammar"}),
        *({"type": "json_schema", "json_schema": {"name": "s", "schema": schema}} for schema in SCHEMAS),
    ),
    "structured_outputs": (
        *({"json": schema} for schema in SCHEMAS),
        *({"regex": pattern} for pattern in PATTERNS),
        *({"grammar": grammar} for grammar in GRAMMARS),
        *({"choice": choice} for choice in ([], [""], ["a", "a"], ["x" * 3000], ["\ud800"], [1], ["a"] * 3000)),
        *({"json": "{", "regex": "a"}, {"json_object": True}, {"whitespace_pattern": "("}),
    ),
    "guided_json": SCHEMAS,
    "guided_regex": PATTERNS,
    "guided_grammar": GRAMMARS,
    "guided_choice": (["a", "b"], [], [""]),
    "tools": ([FUNCTIONS[0]], [FUNCTIONS[0]] * 200, list(FUNCTIONS), *([function] for function in FUNCTIONS)),
    "tool_choice": ("none", "auto", "required", "f", {"type": "function", "function": {"name": "f"}}, {"type": "x"}),
    "n": (1, 2, 4, 17, 64, 129, 16384, 16385),
    "max_tokens": (1, 2, 8, 61, 62, 63, 64, 65),
    "stop": (["a", "b"], "\n", ["\ud800"], ["x" * 300], [f"s{i}" for i in range(2000)], [""]),
    "logit_bias": ({"65": 100}, {"65": -100, "66": 1e308}, {"-1": 0}, {"1e3": 1}, {str(i): 1 for i in range(259)}),
    "stream_options": ({"include_usage": True}, {"continuous_usage_stats": True}, {"include_usage": "maybe"}),
    "chat_template_kwargs": ({"enable_thinking": False}, {"messages": []}, {"self": 1}, {"\x00": {}}, {"a b": 1}),
    "model": ("tiny", "gpt-4o", "", "\ud800"),
    "temperature": (0, 0.7, 1, 2),
    "reasoning_effort": ("none", "low", "", 5),
    "truncation": ("auto", "disabled", "oldest"),
    "stream_interval": (1, 0, -1, 2**31, 2**64),
    "prompt_logprobs": (0, 5, -1, 2**64),
    "seed": (0, 7, -1, 2**64 - 1),
    "logprobs": (0, 1, 5, 20, 21, True, False, -1),
    "top_logprobs": (0, 5, 20, 21, -1),
    "tokens": ([65], [0, 256, 258], [259], [-1], [2**70], [65] * 20_000, []),
}
#: Fields that the server reads although no body type declares them.
EXTRA_FIELDS = ("response_format", "structured_outputs", "tools", "tool_choice", "guided_json", "best_of", "suffix")


def nasty(dice: random.Random, depth: int = 0) -> Json:
    """Return any JSON value, or NaN, infinity or lone surrogates, nested a few levels deep."""
    kinds: list[Callable[[], Json]] = [
        lambda: dice.choice(INTS),
        lambda: dice.choice(FLOATS),
        lambda: dice.choice(TEXTS),
        lambda: dice.choice((None, True, False, [], {})),
    ]
    if depth < 3:
        kinds += [
            lambda: [nasty(dice, depth + 1) for _ in range(dice.choice((1, 2, 5, 40)))],
            lambda: {dice.choice(TEXTS): nasty(dice, depth + 1) for _ in range(dice.randint(1, 4))},
        ]
    return dice.choice(kinds)()


def value_for(dice: random.Random, name: str) -> Json:
    plausible = PLAUSIBLE.get(name)
    return dice.choice(plausible) if plausible and dice.random() < 0.7 else nasty(dice)


def broken_json(dice: random.Random, body: dict[str, Json]) -> bytes:
    """Return bytes that are derived from `body` but aren't its JSON."""
    text = json.dumps(body)
    data = text.encode()
    name = json.dumps(dice.choice([*body, "x"]))
    depth = dice.choice((40, 200, 1000, 20_000))
    kinds: list[Callable[[], bytes]] = [
        lambda: data[: dice.randrange(len(data))],
        lambda: bytes(byte ^ (1 << dice.randrange(8)) if dice.random() < 0.05 else byte for byte in data),
        lambda: b"\xef\xbb\xbf" + data,
        lambda: text.encode("utf-16"),
        lambda: text.encode("utf-32-le"),
        lambda: data.replace(b'"', b"'"),
        lambda: data + data,
        lambda: data[:-1] + f", {name}: null, {name}: {json.dumps(nasty(dice))}}}".encode(),
        lambda: data[:-1] + f", {name}: ".encode() + b"[" * depth + b"]" * depth + b"}",
        lambda: data[:-1] + f", {name}: ".encode() + b'{"a":' * depth + b"1" + b"}" * depth + b"}",
        lambda: (
            data[:-1]
            + f", {name}: ".encode()
            + dice.choice((b"1e999", b"-", b"01", b"1" * 6000, b"+1", b"0x10"))
            + b"}"
        ),
        lambda: (
            data[:-1] + f", {name}: ".encode() + dice.choice((b'"\xff\xfe"', b'"\xed\xa0\x80"', b'"\xc0\xaf"')) + b"}"
        ),
        lambda: dice.randbytes(dice.choice((1, 10, 1000))),
        lambda: dice.choice((b"", b"null", b"[]", b"7", b'"a"', b"\x00", b" " * 5000, b"a=1&b=2")),
    ]
    return dice.choice(kinds)()
