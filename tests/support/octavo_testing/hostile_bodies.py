"""Request bodies that cost a careless server much time or memory for their size; each shape has a function of the size.

Each body is JSON of at most `num_bytes` bytes. Few of them are valid requests. A server may refuse any of them, but
parsing, validating or refusing one may neither block the event loop nor take a multiple of its size in memory.

A product is a body with two large fields, each within its own limit: serving or refusing it is bounded likewise.
"""

import json
from collections.abc import Callable, Mapping
from itertools import combinations, count, takewhile
from typing import Any

from octavo_server.config import RequestLimits

CHAT, COMPLETION, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MESSAGES, BATCH, INVOCATIONS = "/v1/messages", "/v1/chat/completions/batch", "/invocations"
_USER = b'"messages":[{"role":"user","content":"hi"}]'


def _repeated(before: bytes, unit: bytes, after: bytes, num_bytes: int) -> bytes:
    """Return `before`, as many comma-separated `unit`s as fit, and `after`."""
    times = max(1, (num_bytes - len(before) - len(after) + 1) // (len(unit) + 1))
    return before + b",".join([unit] * times) + after


def _filled(before: bytes, filling: bytes, after: bytes, num_bytes: int) -> bytes:
    return before + filling * max(1, (num_bytes - len(before) - len(after)) // len(filling)) + after


def _listed(before: bytes, unit: bytes, after: bytes) -> Callable[[int], bytes]:
    return lambda num_bytes: _repeated(before, unit, after, num_bytes)


def _long(before: bytes, filling: bytes, after: bytes) -> Callable[[int], bytes]:
    return lambda num_bytes: _filled(before, filling, after, num_bytes)


def _nested(num_bytes: int) -> bytes:
    depth = (num_bytes - 64) // 2
    return b'{"messages":' + b"[" * depth + b"]" * depth + b"}"


def _nested_result(num_bytes: int) -> bytes:
    """Tool results that hold each other, as deep as the size allows."""
    unit, end = b'{"type":"tool_result","tool_use_id":"c","content":[', b"]}"
    before, after = b'{"max_tokens":1,"messages":[{"role":"user","content":[', b"]}]}"
    depth = (num_bytes - len(before) - len(after)) // (len(unit) + len(end))
    return before + unit * depth + end * depth + after


def _unknown_fields(num_bytes: int) -> bytes:
    entry_bytes = len(b'"x0000000":0,')
    fields = takewhile(lambda i: (i + 1) * entry_bytes < num_bytes - 64, count())
    return b'{"messages":[],' + b",".join(b'"x%07d":0' % i for i in fields) + b"}"


#: Name of the shape -> path, and a function from the size to the body.
SHAPES: Mapping[str, tuple[str, Callable[[int], bytes]]] = {
    "content of wrong types": (CHAT, _listed(b'{"messages":[{"role":"user","content":[', b"1", b"]}]}")),
    "messages of wrong types": (CHAT, _listed(b'{"messages":[', b"1", b"]}")),
    "prompts of wrong types": (COMPLETION, _listed(b'{"prompt":[', b"{}", b"]}")),
    "stop of wrong types": (CHAT, _listed(b"{" + _USER + b',"stop":[', b"1", b"]}")),
    "input of wrong types": (RESPONSES, _listed(b'{"input":[', b"1", b"]}")),
    "messages": (CHAT, _listed(b'{"messages":[', b'{"role":"a","content":"b"}', b"]}")),
    "empty messages": (CHAT, _listed(b'{"messages":[', b"{}", b"]}")),
    "messages and NaN": (CHAT, _listed(b'{"messages":[', b'{"role":"a","content":"b"}', b",NaN]}")),
    "parts": (
        CHAT,
        _listed(b'{"messages":[{"role":"user","content":[', b'{"type":"text","text":"b"}', b"]}]}"),
    ),
    "parts of a response": (
        RESPONSES,
        _listed(b'{"input":[{"role":"user","content":[', b'{"type":"input_text","text":"b"}', b"]}]}"),
    ),
    "items": (RESPONSES, _listed(b'{"input":[', b'{"role":"user","content":"b"}', b"]}")),
    "tools": (CHAT, _listed(b"{" + _USER + b',"tools":[', b'{"function":{"name":"a"}}', b"]}")),
    "tools of a response": (
        RESPONSES,
        _listed(b'{"input":"hi","tools":[', b'{"type":"function","name":"a"}', b"]}"),
    ),
    "blocks of messages": (
        MESSAGES,
        _listed(b'{"max_tokens":1,"messages":[{"role":"user","content":[', b'{"type":"text","text":"b"}', b"]}]}"),
    ),
    "blocks of a tool result": (
        MESSAGES,
        _listed(
            b'{"max_tokens":1,"messages":[{"role":"user","content":[{"type":"tool_result","tool_use_id":"c","content":[',
            b'{"type":"text","text":"b"}',
            b"]}]}]}",
        ),
    ),
    "messages of wrong types for Anthropic": (MESSAGES, _listed(b'{"max_tokens":1,"messages":[', b"1", b"]}")),
    "system blocks": (
        MESSAGES,
        _listed(b'{"max_tokens":1,"messages":[],"system":[', b'{"type":"text","text":"b"}', b"]}"),
    ),
    "messages for Anthropic": (
        MESSAGES,
        _listed(b'{"max_tokens":1,"messages":[', b'{"role":"user","content":"b"}', b"]}"),
    ),
    "tools for Anthropic": (
        MESSAGES,
        _listed(
            b'{"max_tokens":1,"messages":[{"role":"user","content":"b"}],"tools":[',
            b'{"name":"a","input_schema":{}}',
            b"]}",
        ),
    ),
    "nested results": (MESSAGES, _nested_result),
    "nested objects for Anthropic": (MESSAGES, _long(b'{"max_tokens":1,"messages":', b'{"a":', b"")),
    "invocation": (INVOCATIONS, _listed(b'{"messages":[', b'{"role":"a","content":"b"}', b"]}")),
    "prompts of an invocation": (INVOCATIONS, _listed(b'{"prompt":[', b'"a"', b"]}")),
    "invocation of wrong types": (INVOCATIONS, _listed(b'{"prompt":[', b"{}", b"]}")),
    "nested invocation": (INVOCATIONS, _long(b'{"messages":', b"[", b"")),
    "invocation without a prompt": (INVOCATIONS, _listed(b'{"x":[', b"{}", b"]}")),
    "conversations": (BATCH, _listed(b'{"messages":[', b'[{"role":"a","content":"b"}]', b"]}")),
    "messages of a batch": (BATCH, _listed(b'{"messages":[[', b'{"role":"a","content":"b"}', b"]]}")),
    "empty objects": (CHAT, _listed(b"{" + _USER + b',"x":[', b"{}", b"]}")),
    "empty strings": (CHAT, _listed(b"{" + _USER + b',"x":[', b'""', b"]}")),
    "escaped strings": (CHAT, _listed(b"{" + _USER + b',"x":[', b'"\\\\"', b"]}")),
    "unknown fields": (CHAT, _unknown_fields),
    "nested": (CHAT, _nested),
    "nested objects": (CHAT, _long(b'{"messages":', b'{"a":', b"")),
    "long text": (CHAT, _long(b'{"messages":[{"role":"user","content":"', b"word, ", b'"}]}')),
    "wide text": (CHAT, _long('{"messages":[{"role":"user","content":"👩'.encode(), b"a", b'"}]}')),
    "text of escapes": (CHAT, _long(b'{"messages":[{"role":"user","content":"', b"\\u00e9", b'"}]}')),
    "text of brackets": (CHAT, _long(b'{"messages":[{"role":"user","content":"', b"[{,", b'"}]}')),
    "open string": (CHAT, _long(b'{"messages":"', b"a", b"")),
    "spaces": (CHAT, _long(b'{"messages":[],"x":1', b" ", b"}")),
    "long number": (CHAT, _long(b'{"messages":[],"x":', b"1", b"}")),
    "token ids": (COMPLETION, _listed(b'{"prompt":[', b"17", b"]}")),
    "prompts": (COMPLETION, _listed(b'{"prompt":[', b'"a"', b"]}")),
    "token id lists": (COMPLETION, _listed(b'{"prompt":[', b"[1]", b"]}")),
    "long role": (CHAT, _long(b'{"messages":[{"content":"hi","role":"', b"r", b'"}]}')),
    "long salt": (CHAT, _long(b"{" + _USER + b',"cache_salt":"', b"s", b'"}')),
    "long model": (CHAT, _long(b"{" + _USER + b',"model":"', b"m", b'"}')),
    "logit bias": (CHAT, _listed(b"{" + _USER + b',"logit_bias":{', b'"1":1', b"}}")),
}


def hostile_body(name: str, num_bytes: int) -> tuple[str, bytes]:
    """Return the path and the body of a shape."""
    path, make = SHAPES[name]
    return path, make(num_bytes)


_LIMITS = RequestLimits()
_TURN = {"role": "user", "content": "a"}
#: Fields of which each sequence gets a copy, with the most entries and characters that each may have.
_LISTS: Mapping[str, Any] = {
    "stop": ["x" * (_LIMITS.max_stop_strings_chars // _LIMITS.max_stop_strings)] * _LIMITS.max_stop_strings,
    "stop_token_ids": [5] * _LIMITS.max_stop_token_ids,
    "bad_words": ["x" * (_LIMITS.max_bad_words_chars // _LIMITS.max_bad_words)] * _LIMITS.max_bad_words,
    "logit_bias": {str(i % 200).zfill(3 + i // 200): 1 for i in range(_LIMITS.max_logit_bias)},
    "allowed_token_ids": [5] * _LIMITS.max_allowed_token_ids,
}
#: (path, field) -> the field with so many sequences.
_SEQUENCES: Mapping[tuple[str, str], Callable[[int], Any]] = {
    (COMPLETION, "prompt"): lambda num: ["a"] * min(num, _LIMITS.max_prompts),
    (COMPLETION, "n"): lambda num: min(num, _LIMITS.max_n),
    (CHAT, "n"): lambda num: min(num, _LIMITS.max_n),
    (BATCH, "messages"): lambda num: [[_TURN]] * min(num, _LIMITS.max_prompts),
}
#: Other fields of a chat request, as large as they may be.
_CHAT: Mapping[str, Any] = {
    "messages": [_TURN] * _LIMITS.max_messages,
    "tools": [{"type": "function", "function": {"name": f"f{i}"}} for i in range(_LIMITS.max_tools)],
    "n": _LIMITS.max_n,
    **_LISTS,
}


def _products() -> dict[str, tuple[str, dict[str, Any], dict[str, Any]]]:
    found = {
        f"{path} {field} x {name}": (
            path,
            {field: sequences(_LIMITS.max_json_values // _weight(value)), name: value},
            {field: sequences(_LIMITS.max_json_values), name: value},
        )
        for (path, field), sequences in _SEQUENCES.items()
        for name, value in _LISTS.items()
    }
    for names in combinations(_CHAT, 2):
        body = {name: _CHAT[name] for name in names}
        found.setdefault(f"{CHAT} {' x '.join(names)}", (CHAT, body, body))
    prompts = {"prompt": ["a"] * _LIMITS.max_prompts, "n": _LIMITS.max_n}
    return found | {f"{COMPLETION} prompt x n": (COMPLETION, prompts, prompts)}


def _weight(value: Any) -> int:
    return sum(len(entry) if isinstance(entry, str) and isinstance(value, list) else 1 for entry in value)


#: Name of the product -> path, the body within the bound of the product, and the body with both fields at their limits.
PRODUCTS = _products()
_REQUIRED = {CHAT: {"messages": [_TURN]}, COMPLETION: {"prompt": "a"}, BATCH: {}}


def product_body(name: str, *, is_beyond: bool) -> tuple[str, bytes]:
    path, within, beyond = PRODUCTS[name]
    return path, json.dumps({**_REQUIRED[path], **(beyond if is_beyond else within), "max_tokens": 1}).encode()
