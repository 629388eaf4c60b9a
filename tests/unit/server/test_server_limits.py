"""Limits of one request: an error names the field, the value, the limit and the flag."""

import pytest
from octavo_engine.wire.errors import ContextLengthExceeded, InvalidRequest
from octavo_server.config import RequestLimits
from octavo_server.openai.json_bounds import check_json
from octavo_server.openai.limits import MAX_FIELDS, check_chars, check_counts, check_fits

LIMITS = RequestLimits(
    max_json_depth=4, max_json_values=40, max_messages=2, max_content_parts=3, max_tools=2, max_prompts=2, max_n=2,
    max_stop_strings=2, max_stop_chars=5,
    max_stop_token_ids=2, max_bad_words=2, max_logit_bias=2, max_allowed_token_ids=2,
)  # fmt: skip
HELLO = {"role": "user", "content": "hi"}

CASES = {
    # fields within the limit, fields beyond it, named field, named flag
    "tools": ({"tools": [{}] * 2}, {"tools": [{}] * 3}, "tools", "--max-tools"),
    "prompts": ({"prompt": ["a", "b"]}, {"prompt": ["a", "b", "c"]}, "prompt", "--max-prompts"),
    "token prompts": ({"prompt": [[1], [2]]}, {"prompt": [[1], [2], [3]]}, "prompt", "--max-prompts"),
    "n": ({"n": 2}, {"n": 3}, "n", "--max-n"),
    "stop": ({"stop": ["a", "b"]}, {"stop": ["a", "b", "c"]}, "stop", "--max-stop-strings"),
    "stop length": ({"stop": "12345"}, {"stop": "123456"}, "stop", "--max-stop-chars"),
    "one long stop": ({"stop": ["a", "12345"]}, {"stop": ["a", "123456"]}, "stop", "--max-stop-chars"),
    "stop_token_ids": ({"stop_token_ids": [1, 2]}, {"stop_token_ids": [1, 2, 3]}, "stop_token_ids", "--max-stop-tok"),
    "bad_words": ({"bad_words": ["a", "b"]}, {"bad_words": ["a", "b", "c"]}, "bad_words", "--max-bad-words"),
    "bad word length": ({"bad_words": ["12345"]}, {"bad_words": ["123456"]}, "bad_words", "--max-stop-chars"),
    "logit_bias": ({"logit_bias": {"1": 1}}, {"logit_bias": {"1": 1, "2": 1, "3": 1}}, "logit_bias", "--max-logit-"),
    "allowed": ({"allowed_token_ids": [1]}, {"allowed_token_ids": [1, 2, 3]}, "allowed_token_ids", "--max-allowed-"),
}  # fmt: skip


def completion(**fields):
    return {"prompt": "a", **fields}


@pytest.mark.parametrize(("within", "beyond", "param", "flag"), CASES.values(), ids=CASES)
def test_counts_beyond_their_limits_are_rejected(within, beyond, param, flag):
    check_counts(completion(**within), LIMITS)
    with pytest.raises(InvalidRequest, match=r"limit") as caught:
        check_counts(completion(**beyond), LIMITS)
    assert caught.value.param == param
    assert flag in str(caught.value)


def test_too_many_messages_are_rejected():
    check_counts({"messages": [HELLO] * 2}, LIMITS)
    with pytest.raises(InvalidRequest, match=r"messages holds 3 entries, more than 2, the limit.*--max-messages"):
        check_counts({"messages": [HELLO] * 3}, LIMITS)


@pytest.mark.parametrize(("name", "field"), [("messages", "content"), ("input", "content"), ("input", "output")])
def test_too_many_content_parts_are_rejected(name, field):
    parts = [{"type": "text", "text": "a"}]
    check_counts({name: [{field: parts * 3}, {field: "a"}]}, LIMITS)
    with pytest.raises(InvalidRequest, match=r"holds 4 entries, more than 3, the limit.*--max-content-parts") as caught:
        check_counts({name: [{field: parts * 2}, {field: parts * 2}]}, LIMITS)
    assert caught.value.param == name


@pytest.mark.parametrize(
    "fields", [{"messages": 1}, {"messages": [1, {"content": 2}]}, {"stop": [1, None]}, {"n": "9"}]
)
def test_wrong_types_are_ignored_by_the_limits(fields):
    check_counts(fields, LIMITS)


@pytest.mark.parametrize("prompt", ["a" * 100, [1] * 100], ids=["text", "ids"])
def test_prompt_of_token_ids_counts_as_one(prompt):
    check_counts(completion(prompt=prompt), LIMITS)


@pytest.mark.parametrize(
    "body",
    [b"", b"[[[[]]]]", b'{"a": [{"b": [1]}]}', b"[]" * 20, b'"' + b"[" * 20 + b'"', b'["\\"[[[[[[", {}]', b"]]]]]]"],
)
def test_shallow_bodies_are_accepted(body):
    check_json(body, LIMITS)


@pytest.mark.parametrize("body", [b"[" * 5, b'{"a":' * 30, b'["[[", [[[[1]]]]]', b'{"x": "\\\\", "y": [[[[1]]]]}'])
def test_deep_bodies_are_rejected(body):
    with pytest.raises(InvalidRequest, match=r"more than 4 levels deep, the limit.*--max-json-depth"):
        check_json(body, LIMITS)


@pytest.mark.parametrize(
    "body", [b'"\\\\' * 400_000, b'"' * 1_000_001 + b"[" * 9, b'["' + b'\\"' * 400_000], ids=range(3)
)
def test_unclosed_strings_take_no_time(body):
    check_json(body, LIMITS)


@pytest.mark.parametrize(
    "body",
    [
        b"[" + b"1," * 38 + b"1]",
        b'["' + b",[{" * 400_000 + b'"]',
        b'{"a": "' + b'\\",[' * 400_000 + b'"}',
        b"[" + b'"a, b", ' * 39 + b'"c"]',
    ],
    ids=["numbers", "text of separators", "text of escapes", "texts with commas"],
)
def test_bodies_with_few_values_are_accepted(body):
    check_json(body, LIMITS)


@pytest.mark.parametrize(
    "body",
    [b"[" + b"1," * 40 + b"1]", b"[" * 41, b'{"a":0,' * 21, b'["\\\\",' + b'"",' * 40, b'["",' + b'"[",' * 40],
    ids=["numbers", "brackets", "objects", "behind an escape", "strings"],
)
def test_bodies_with_many_values_are_rejected(body):
    with pytest.raises(InvalidRequest, match=r"more than 40 values, the limit.*--max-json-values"):
        check_json(body, LIMITS)


def test_prompts_of_many_token_ids_are_within_the_default_limits():
    body = b'{"prompt":[' + b",".join([b"[" + b",".join([b"128000"] * 131_072) + b"]"] * 3) + b"]}"
    check_json(body, RequestLimits())
    assert len(body) < RequestLimits().max_request_bytes


def test_text_that_cannot_fit_is_rejected_without_tokenising():
    check_fits("x" * 30, max_model_len=10, longest_token=3)
    with pytest.raises(ContextLengthExceeded, match="at least 11 input tokens"):
        check_fits("x" * 31, max_model_len=10, longest_token=3)


def test_text_too_long_to_tokenise_is_rejected():
    limits = RequestLimits(max_prompt_chars=10)
    check_chars("x" * 10, limits)
    with pytest.raises(InvalidRequest, match=r"has 11 characters, the limit is 10: .*--max-prompt-chars"):
        check_chars("x" * 11, limits)


def test_body_with_too_many_fields_is_rejected():
    body = {f"x{number}": 0 for number in range(MAX_FIELDS + 1)}
    with pytest.raises(InvalidRequest, match=rf"{MAX_FIELDS + 1} fields, the limit is {MAX_FIELDS}"):
        check_counts(body, RequestLimits())
    body.popitem()
    check_counts(body, RequestLimits())
